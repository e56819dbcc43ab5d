"""What a family file gives: how config.json is read, and which checkpoint tensors make up each parameter.

Knows names and positions; reads nothing.

Seen from the loader, a projection is an [in, out] table, and a checkpoint tensor [out, in] fills some of its columns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxllm.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor, or some of its rows, and the place it takes in a parameter.

    A `linear` tensor [out, in] is transposed; a bias is one with a single column, [out]. The parameter's columns are
    cut into `units` equal parts, the tensor's rows likewise, and part u of the one takes part u of the other from its
    column `column` on. Other tensors (embeddings, norms) are stored as they are. `{l}` in the name stands for the
    layer; `rows` are the first row and the one behind the last, where the tensor holds more than this piece.
    """

    name: str
    shape: tuple[int, ...]
    linear: bool = True
    units: int = 1
    column: int = 0
    rows: tuple[int, int] | None = None

    @property
    def first_row(self) -> int:
        return self.rows[0] if self.rows else 0

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0] if self.rows else self.shape[0]


Pieces = dict[str, tuple[Piece, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is read. `harmless` are keys of its config.json that change no result."""

    configure: Callable[[Mapping], ModelConfig]
    pieces: Callable[[ModelConfig], Mapping[str, tuple[Piece, ...]]]
    harmless: frozenset[str] = frozenset()


LAYER = "model.layers.{l}."
ATTENTION, MLP = LAYER + "self_attn.", LAYER + "mlp."


def decoder_pieces(cfg: ModelConfig) -> Pieces:
    """The names most families share, those of Llama in transformers: without norms behind sub-layers or of q and k."""
    pieces = {
        "embedding.tokens": (Piece("model.embed_tokens.weight", (cfg.vocab_size, cfg.d_model), linear=False),),
        **norm(cfg, "head.norm", "model.norm"),
        **qkv_pieces(cfg),
        **linear_pieces(cfg.o_bias, "layers.attention.o", ATTENTION + "o_proj", cfg.d_model, _q_rows(cfg)),
        **(gate_up_pieces(cfg) if cfg.gated_mlp else {}),
        **linear_pieces(cfg.mlp_bias, "layers.mlp.down", MLP + "down_proj", cfg.d_model, cfg.d_ff),
    }
    if cfg.pre_norms:
        pieces |= norm(cfg, "layers.attention_norm", LAYER + "input_layernorm")
        if not cfg.parallel_mlp:
            pieces |= norm(cfg, "layers.mlp_norm", LAYER + "post_attention_layernorm")
    if not cfg.tie_embeddings:
        pieces["head.proj"] = (Piece("lm_head.weight", (cfg.vocab_size, cfg.d_model), linear=False),)
    return pieces


def norm(cfg: ModelConfig, parameter: str, name: str, size: int | None = None) -> Pieces:
    """A norm over the model's width, or over `size` features, with its bias if the model's norms have one."""
    shape = (cfg.d_model if size is None else size,)
    pieces = {parameter + ".scale": (Piece(name + ".weight", shape, linear=False),)}
    if cfg.norm_bias:
        pieces[parameter + ".bias"] = (Piece(name + ".bias", shape, linear=False),)
    return pieces


def qk_norm_pieces(cfg: ModelConfig) -> Pieces:
    """The norms of queries and keys under Qwen 3's names, which others share."""
    pieces: Pieces = {}
    for parameter, num_heads in (("q_norm", cfg.num_q_heads), ("k_norm", cfg.num_kv_heads)):
        shapes = {"head": (cfg.head_dim,), "each_head": (num_heads, cfg.head_dim)}
        shape = shapes.get(cfg.qk_norm or "head", (num_heads * cfg.head_dim,))
        piece = Piece(f"{ATTENTION}{parameter}.weight", shape, linear=cfg.qk_norm == "all_heads")
        pieces[f"layers.attention.{parameter}.scale"] = (piece,)
    return pieces


def qkv_pieces(cfg: ModelConfig, fused: str | None = None) -> Pieces:
    """Queries, keys and values, from three tensors or from the rows of one whose name is `fused`."""
    G, H, kv_rows = cfg.num_q_heads // cfg.num_kv_heads, cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    parts = (("q_proj", _q_rows(cfg), 0), ("k_proj", kv_rows, G * H), ("v_proj", kv_rows, (G + 1) * H))
    total = _q_rows(cfg) + 2 * kv_rows

    def pieces(suffix: str, row_shape: tuple[int, ...]) -> tuple[Piece, ...]:
        found, row = [], 0
        for name, count, column in parts:
            whole = (count, None) if fused is None else (total, (row, row + count))
            name = ATTENTION + (fused or name) + suffix
            found.append(Piece(name, (whole[0], *row_shape), units=cfg.num_kv_heads, column=column, rows=whole[1]))
            row += count
        return tuple(found)

    made = {"layers.attention.qkv_proj": pieces(".weight", (cfg.d_model,))}
    if cfg.qkv_bias:
        made["layers.attention.qkv_bias"] = pieces(".bias", ())
    return made


def gate_up_pieces(cfg: ModelConfig, fused: str | None = None) -> Pieces:
    """Gate and up, from two tensors or from one that holds both, whose name is `fused`."""
    F = cfg.d_ff
    parts = ((("gate_proj", F, 0), ("up_proj", F, F))) if fused is None else ((fused, 2 * F, 0),)
    made = {
        "layers.mlp.gate_up_proj": tuple(
            Piece(f"{MLP}{name}.weight", (rows, cfg.d_model), column=column) for name, rows, column in parts
        )
    }
    if cfg.mlp_bias:
        made["layers.mlp.gate_up_bias"] = tuple(
            Piece(f"{MLP}{name}.bias", (rows,), column=column) for name, rows, column in parts
        )
    return made


def linear_pieces(has_bias: bool, parameter: str, name: str, rows: int, columns: int) -> Pieces:
    """One whole projection [rows, columns], with its bias if it has one."""
    made = {parameter + "_proj": (Piece(name + ".weight", (rows, columns)),)}
    if has_bias:
        made[parameter + "_bias"] = (Piece(name + ".bias", (rows,), linear=False),)
    return made


def _q_rows(cfg: ModelConfig) -> int:
    return cfg.num_q_heads * cfg.head_dim
