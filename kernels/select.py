"""Picks one version of each operation, once, at engine start. Knows names and device kinds; calls nothing itself."""

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from jaxllm.kernels.launch import capability

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """One implementation of an operation: where it lives, and which platforms can run it ("" is any).

    It is passed over where one of the modules that it `requires` cannot be imported, and on GPUs of a lower compute
    capability (times ten) than the least or a higher one than the most (0: any).
    """

    name: str
    module: str
    platforms: tuple[str, ...] = ("",)
    requires: tuple[str, ...] = ()
    least_capability: int = 0
    most_capability: int = 0


def _triton(operation: str) -> Version:
    module = f"jaxllm.kernels.{operation}.triton"
    return Version("triton", module, ("gpu",), requires=("triton",), least_capability=80)


def _fused(operation: str) -> tuple[Version, ...]:
    folder = "jaxllm.kernels.fused_linear"
    tuned = Version("tuned", f"{folder}.tuned", ("gpu",), ("triton",), least_capability=80)
    return tuned, Version("reference", f"{folder}.reference")


_PAGED_ATTENTION = (
    Version(
        "mosaic",
        "jaxllm.kernels.paged_attention.mosaic",
        ("gpu",),
        requires=("triton", "jax.experimental.pallas.mosaic_gpu"),
        least_capability=90,
        most_capability=90,
    ),
    _triton("paged_attention"),
    Version("reference", "jaxllm.kernels.paged_attention.reference"),
)

# Best first. A GPU version is one more line here and one more file beside the reference.
VERSIONS: dict[str, tuple[Version, ...]] = {
    "paged_attention": _PAGED_ATTENTION,
    "plan_attention": _PAGED_ATTENTION,  # a plan is for the version that made it
    "kv_write": (_triton("kv_write"), Version("reference", "jaxllm.kernels.kv_write.reference")),
    "rope_kv_write": (_triton("rope_kv_write"), Version("reference", "jaxllm.kernels.rope_kv_write.reference")),
    "matmul": (
        Version("tuned", "jaxllm.kernels.matmul.tuned", ("gpu",), ("triton",), least_capability=80),
        Version("reference", "jaxllm.kernels.matmul.reference"),
    ),
    **{
        operation: _fused(operation)
        for operation in ("norm_linear", "norm_gated_linear", "linear_add", "linear_all_reduce")
    },
    "all_reduce": (_triton("all_reduce"), Version("reference", "jaxllm.kernels.all_reduce.reference")),
    "apply_rope": (Version("reference", "jaxllm.kernels.rope.reference"),),
    "rms_norm": (Version("reference", "jaxllm.kernels.rms_norm.reference"),),
    "layer_norm": (Version("reference", "jaxllm.kernels.layer_norm.reference"),),
    "choose": (_triton("sampling"), Version("reference", "jaxllm.kernels.sampling.reference")),
}


def select(operation: str, *, platform: str, preferred: str = "auto") -> Callable:
    """Gives the function of the best version that runs on the platform, or of the preferred one.

    Raises:
        ValueError: the preferred version does not exist, or does not run on this platform.
    """
    fitting = [v for v in VERSIONS[operation] if "" in v.platforms or platform in v.platforms]
    wanted = fitting if preferred == "auto" else [v for v in fitting if v.name == preferred]
    if not wanted:
        known = ", ".join(["auto", *(v.name for v in fitting)])
        raise ValueError(f"{operation}: no version {preferred!r} on {platform}; choose one of {known}")
    for version in wanted:
        obstacle = find_obstacle(version)
        if obstacle is None:
            logger.info("%s: %s", operation, version.name)
            return getattr(importlib.import_module(version.module), operation)
        if preferred != "auto":
            raise ValueError(f"{operation}: version {preferred!r} cannot be used: {obstacle}")
        logger.warning("%s: %s cannot be used, the next best will be: %s", operation, version.name, obstacle)
    raise ValueError(f"{operation}: no version runs on {platform}")


def find_obstacle(version: Version) -> str | None:
    """Says in one line why the version cannot be used on this machine; None where it can."""
    if version.least_capability and capability() < version.least_capability:
        return f"it needs compute capability {version.least_capability / 10}, the GPU has {capability() / 10}"
    if version.most_capability and capability() > version.most_capability:
        return f"it is made for compute capability {version.most_capability / 10}, the GPU has {capability() / 10}"
    for module in version.requires:
        try:
            importlib.import_module(module)
        except Exception as error:  # two packages that do not fit each other raise all sorts of things
            return f"import {module} fails: {str(error).splitlines()[0] if str(error) else repr(error)}"
    return None
