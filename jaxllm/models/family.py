"""What a family file gives: how config.json is read, and which checkpoint tensors make up each parameter.

Knows names and positions; reads nothing.

Seen from the loader, a projection is an [in, out] table, and a checkpoint tensor [out, in] fills some of its columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxllm.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor and the place it takes in a parameter.

    A `linear` tensor [out, in] is transposed. The parameter's columns are cut into `units` equal parts, the tensor's
    rows likewise, and part u of the one takes part u of the other from its column `column` on. Other tensors
    (embeddings, norms) are stored as they are. `{l}` in the name stands for the layer.
    """

    name: str
    shape: tuple[int, ...]
    linear: bool = True
    units: int = 1
    column: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is read."""

    configure: Callable[[Mapping], ModelConfig]
    pieces: Callable[[ModelConfig], Mapping[str, tuple[Piece, ...]]]


def decoder_pieces(cfg: ModelConfig) -> dict[str, tuple[Piece, ...]]:
    """The names most families share, those of Llama in transformers."""
    D, F, N, K, H = cfg.d_model, cfg.d_ff, cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim
    G, layer = N // K, "model.layers.{l}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    pieces = {
        "embedding.tokens": (Piece("model.embed_tokens.weight", (cfg.vocab_size, D), linear=False),),
        "layers.attention_norm": (norm(layer + "input_layernorm", D),),
        "layers.attention.qkv_proj": (
            Piece(attention + "q_proj.weight", (N * H, D), units=K, column=0),
            Piece(attention + "k_proj.weight", (K * H, D), units=K, column=G * H),
            Piece(attention + "v_proj.weight", (K * H, D), units=K, column=(G + 1) * H),
        ),
        "layers.attention.o_proj": (Piece(attention + "o_proj.weight", (D, N * H)),),
        "layers.mlp_norm": (norm(layer + "post_attention_layernorm", D),),
        "layers.mlp.gate_up_proj": (
            Piece(mlp + "gate_proj.weight", (F, D), column=0),
            Piece(mlp + "up_proj.weight", (F, D), column=F),
        ),
        "layers.mlp.down_proj": (Piece(mlp + "down_proj.weight", (D, F)),),
        "head.norm": (norm("model.norm", D),),
    }
    if not cfg.tie_embeddings:
        pieces["head.proj"] = (Piece("lm_head.weight", (cfg.vocab_size, D), linear=False),)
    return pieces


def norm(name: str, size: int) -> Piece:
    return Piece(name + ".weight", (size,), linear=False)
