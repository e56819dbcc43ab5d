"""What one decoder looks like, family by family already resolved. Knows shapes and constants; holds no arrays."""

import dataclasses
import logging
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from jaxllm.config.errors import InputError
from jaxllm.models.heads import HeadLayout, check_ffn, lay_out_heads
from jaxllm.models.rope import RopeConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What differs between the layers of one model: its sliding window (None sees all) and which rope it uses."""

    window: int | None = None
    rope: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. Sizes in elements; `layer_kinds` has one entry per layer.

    `norm` is "rms" or "layer", with biases or without; `norm_offset` is added to every norm weight (Gemma stores
    weight - 1). `pre_norms` normalise what goes into attention and MLP, `post_norms` what comes out. With
    `parallel_mlp` both read the same normalised input. `qk_norm` normalises queries and keys: "head" each head with one
    weight for all, "each_head" with a weight for each, "all_heads" all heads together. A gated MLP multiplies by a
    second projection. `rope_interleaved` turns features 2i and 2i + 1 with each other instead of i and i + dim / 2.
    The four scales multiply the embeddings, what each sub-layer adds, the scores of attention, and the logits.

    `tensor` and `heads` are set by `split`: the heads are then the places and slots of that layout, as the decoder
    stores them.

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
    rope_interleaved: bool = False
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float
    norm_offset: float = 0.0
    norm_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: Literal["head", "each_head", "all_heads"] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    parallel_mlp: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float
    attention_softcap: float | None = None
    logit_scale: float = 1.0
    final_softcap: float | None = None
    tie_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    tensor: int = 1
    heads: HeadLayout | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "d_ff", "num_q_heads", "num_kv_heads", "head_dim", "num_layers"):
            if getattr(self, name) < 1:
                raise InputError(f"config.json: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_q_heads % self.num_kv_heads:
            raise InputError(
                f"config.json: {self.num_q_heads} attention heads are not a multiple of {self.num_kv_heads} KV heads"
            )

    def at_length(self, length: int) -> "ModelConfig":
        """Gives the same model for a run whose contexts have at most `length` tokens: some ropes depend on it."""
        return dataclasses.replace(self, ropes=tuple(rope.at_length(length) for rope in self.ropes))

    def split(self, tensor: int) -> "ModelConfig":
        """Gives the configuration that the decoder is built with for so many tensor ranks; for one, the same.

        Raises:
            InputError: the heads or the feed-forward cannot be dealt to the ranks.
        """
        if tensor == 1:
            return self
        check_ffn(self.num_q_heads, self.num_kv_heads, self.d_ff, tensor)
        layout = lay_out_heads(self.num_q_heads, self.num_kv_heads, tensor, lambda ranks: self.d_ff % ranks == 0)
        if not layout.is_plain:
            logger.info("%s", layout.describe())
        return dataclasses.replace(
            self, num_q_heads=layout.places, num_kv_heads=layout.num_slots, tensor=tensor, heads=layout
        )

    def unsplit(self) -> "ModelConfig":
        """Gives the configuration before it was split: what a checkpoint holds."""
        if self.heads is None:
            return self
        sizes = {"num_q_heads": self.heads.num_q_heads, "num_kv_heads": self.heads.num_kv_heads}
        return dataclasses.replace(self, **sizes, tensor=1, heads=None)

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head: those from `vocab_size` on make the tensor ranks' shares equal."""
        return -(-self.vocab_size // self.tensor) * self.tensor

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
