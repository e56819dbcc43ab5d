"""Picks one version of each operation, once, at engine start. Knows names and device kinds; calls nothing itself."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """One implementation of an operation: where it lives, and which platforms can run it ("" is any)."""

    name: str
    module: str
    platforms: tuple[str, ...] = ("",)


# Best first. A GPU version is one more line here and one more file beside the reference.
VERSIONS: dict[str, tuple[Version, ...]] = {
    "paged_attention": (Version("reference", "jaxllm.kernels.paged_attention.reference"),),
    "kv_write": (Version("reference", "jaxllm.kernels.kv_write.reference"),),
    "apply_rope": (Version("reference", "jaxllm.kernels.rope.reference"),),
    "rms_norm": (Version("reference", "jaxllm.kernels.rms_norm.reference"),),
    "layer_norm": (Version("reference", "jaxllm.kernels.layer_norm.reference"),),
}


def select(operation: str, *, platform: str, preferred: str = "auto") -> Callable:
    """Gives the function of the best version that runs on the platform, or of the preferred one.

    Raises:
        ValueError: the preferred version does not exist, or does not run on this platform.
    """
    fitting = [v for v in VERSIONS[operation] if "" in v.platforms or platform in v.platforms]
    chosen = fitting[0] if preferred == "auto" else next((v for v in fitting if v.name == preferred), None)
    if chosen is None:
        known = ", ".join(["auto", *(v.name for v in fitting)])
        raise ValueError(f"{operation}: no version {preferred!r} on {platform}; choose one of {known}")
    logger.info("%s: %s", operation, chosen.name)
    return getattr(importlib.import_module(chosen.module), operation)
