"""What one decoder looks like, family by family already resolved. Knows shapes and constants; holds no arrays."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from jaxllm.config.errors import InputError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding: its base, the features it turns, and how its frequencies are stretched."""

    theta: float
    dim: int
    scaling: tuple[tuple[str, Any], ...] = ()

    def inv_freq(self) -> np.ndarray:
        """Gives the dim / 2 angular frequencies in radians per position, float32.

        Scaling "linear" divides them (Chen et al., 2023, arXiv:2306.15595); "llama3" divides the slow ones only and
        blends between, as published with Llama 3.1; "factors" divides each by its own number.
        """
        # In float32 throughout, as the reference implementations compute it.
        exponent = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        freq = (np.float32(1.0) / np.power(np.float32(self.theta), exponent)).astype(np.float32)
        options = dict(self.scaling)
        kind = options.get("rope_type", "default")
        if kind == "default":
            return freq
        if kind == "factors":
            return freq / np.asarray(options["factors"], np.float32)
        factor = np.float32(options["factor"])
        if kind == "linear":
            return freq / factor
        low, high = float(options["low_freq_factor"]), float(options["high_freq_factor"])
        original = float(options["original_max_position_embeddings"])
        turns = original * freq / np.float32(2 * math.pi)
        blend = np.clip((turns - low) / (high - low), 0.0, 1.0).astype(np.float32)
        return (1 - blend) * freq / factor + blend * freq


ROPE_TYPES = ("default", "linear", "llama3", "factors")


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What differs between the layers of one model: its sliding window (None sees all) and which rope it uses."""

    window: int | None = None
    rope: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. Sizes in elements; `layer_kinds` has one entry per layer.

    `norm_offset` is added to every norm weight (Gemma stores weight - 1); `embed_scale` multiplies the embeddings;
    `post_norms` puts a norm behind attention and MLP as well as before them.

    Raises:
        InputError: a size is not positive, or the query heads cannot be dealt evenly to the KV heads.
    """

    architecture: str
    vocab_size: int
    d_model: int
    d_ff: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    layer_kinds: tuple[LayerKind, ...]
    ropes: tuple[RopeConfig, ...]
    norm_eps: float
    norm_offset: float = 0.0
    activation: str = "silu"
    attention_scale: float
    attention_softcap: float | None = None
    final_softcap: float | None = None
    embed_scale: float = 1.0
    qk_norm: bool = False
    post_norms: bool = False
    tie_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "d_ff", "num_q_heads", "num_kv_heads", "head_dim", "num_layers"):
            if getattr(self, name) < 1:
                raise InputError(f"config.json: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise InputError(
                f"config.json: {self.num_q_heads} attention heads are not a multiple of {self.num_kv_heads} KV heads"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @cached_property
    def kv_layout(self) -> "KVLayout":
        return kv_layout(self.layer_kinds)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layers grouped by what their KV needs, in groups of equal size that share one pool of blocks.

    `windows` has one entry per group; layer l keeps its KV in slot `slot[l]` of the cache, block table `group[l]`.
    """

    windows: tuple[int | None, ...]
    group: tuple[int, ...]
    slot: tuple[int, ...]
    layers_per_group: int


def kv_layout(kinds: tuple[LayerKind, ...]) -> KVLayout:
    """Forms the largest groups of equal size whose layers have the same window."""
    by_window: dict[int | None, list[int]] = {}
    for layer, kind in enumerate(kinds):
        by_window.setdefault(kind.window, []).append(layer)
    size = math.gcd(*(len(layers) for layers in by_window.values()))
    windows, group, slot = [], [0] * len(kinds), [0] * len(kinds)
    for window, layers in by_window.items():
        for i, layer in enumerate(layers):
            group[layer], slot[layer] = len(windows) + i // size, i % size
        windows += [window] * (len(layers) // size)
    return KVLayout(tuple(windows), tuple(group), tuple(slot), size)
