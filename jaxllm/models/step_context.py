"""What a layer is called with besides its input: kernels, its place, and the step's tables. Knows no weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int


class Kernels(NamedTuple):
    """The chosen version of each operation; see jaxllm.kernels.select."""

    paged_attention: Callable
    plan_attention: Callable
    rope_kv_write: Callable
    rms_norm: Callable
    layer_norm: Callable
    choose: Callable
    matmul: Callable
    norm_linear: Callable
    norm_gated_linear: Callable
    linear_add: Callable
    linear_all_reduce: Callable
    all_reduce: Callable  # over the tensor ranks, where there are several


class LayerPlace(NamedTuple):
    """Where one layer finds its block table and cache slot, and its window and rope. Integers, or traced scalars."""

    group: int | Int[Array, ""]
    slot: int | Int[Array, ""]
    window: int | Int[Array, ""] | None
    rope: int | Int[Array, ""]


class StepContext(NamedTuple):
    """What every layer of a step reads besides weights and cache. R ropes, G KV groups, B requests, M table width."""

    cos: Float[Array, "R T H2"]
    sin: Float[Array, "R T H2"]
    write_block: Int[Array, "G T"]
    write_offset: Int[Array, " T"]
    block_table: Int[Array, "G B M"]
    query_start: Int[Array, " B+1"]
    context_len: Int[Array, " B"]
    plan: Any = None  # of plan_attention, for the window of the layer that is called
