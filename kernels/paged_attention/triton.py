"""Ragged paged attention in Triton, for any card: who brings few new tokens takes one kernel, who brings many another.

Knows the same as the reference. Refuses to know how a kernel works.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.kernels.paged_attention import triton_decode, triton_prefill
from jaxllm.kernels.paged_attention.tuning import DecodeConfig, decode_config, prefill_config
from jaxllm.kernels.paged_attention.work_list import ChunkList, TileList, list_chunks, list_tiles


class ConfigForMany(Protocol):
    """Constants of a kernel for many new tokens."""

    def tile_tokens(self, group: int) -> int: ...


class AttentionPlan(NamedTuple):
    """Which piece of the batch each program takes: chunks for few new tokens, tiles for many (none when decoding)."""

    chunks: ChunkList
    tiles: TileList | None


def plan_attention(
    kv_cache: Float[Array, "L P 2 K C H"],
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    *,
    num_tokens: int,
    table_width: int,
    group: int,
    dtype: jnp.dtype,
    window: int | None = None,
    has_sinks: bool = False,
) -> AttentionPlan:
    """The lists of work for a batch and a window; see the reference."""
    types, H = (dtype, kv_cache.dtype), kv_cache.shape[-1]
    few, many = decode_config(H, *types, context_len.shape[0]), prefill_config(H, *types)
    return list_work(few, many, kv_cache, query_start, context_len, num_tokens, table_width, group, window)


def paged_attention(
    query: Float[Array, "T N H"],
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    *,
    scale: float,
    window: int | Int[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    plan: AttentionPlan | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of each request's new tokens over its own context; see the reference."""
    types = (query.dtype, kv_cache.dtype)
    few, many = decode_config(query.shape[2], *types, block_table.shape[0]), prefill_config(query.shape[2], *types)
    arguments = (query, kv_cache, layer, block_table, query_start, context_len)
    return attend(few, many, *arguments, scale, window=window, softcap=softcap, sinks=sinks, plan=plan)


def attend(
    few: DecodeConfig,
    many: ConfigForMany,
    query: Float[Array, "T N H"],
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    scale: float,
    *,
    window: int | Int[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    plan: AttentionPlan | None = None,
    prefill: Callable = triton_prefill.prefill,
    align: int = 1,
) -> Float[Array, "T N H"]:
    """The same with the constants for few and for many new tokens given, the kernel for many, and its tiles' alignment.

    In a mixed batch (T != B) the tiles are computed first, and the chunks add their rows to the same array.
    """
    T, group = query.shape[0], query.shape[1] // kv_cache.shape[3]
    B, M = block_table.shape
    if plan is None:
        plan = list_work(few, many, kv_cache, query_start, context_len, T, M, group, window, align=align)
    arguments = (query, kv_cache, layer, block_table)
    options = {"scale": scale, "window": window, "softcap": softcap}
    if sinks is not None:  # not every kernel for many tokens knows them
        options["sinks"] = sinks
    attended_TNH: jax.Array | None = None
    if plan.tiles is not None:
        attended_TNH = prefill(*arguments, plan.tiles, **options, config=many)
    options |= {"max_new": _most_new(T, B, group), "config": few, "out": attended_TNH}
    return triton_decode.decode(*arguments, query_start, context_len, plan.chunks, **options)


def list_work(
    few: DecodeConfig,
    many: ConfigForMany,
    kv_cache: Float[Array, "L P 2 K C H"],
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    num_tokens: int,
    table_width: int,
    group: int,
    window: int | Int[Array, ""] | None,
    *,
    align: int = 1,
) -> AttentionPlan:
    """The plan for given constants, and the alignment of the tiles of the kernel for many new tokens."""
    K, C = kv_cache.shape[3:5]
    is_decode = num_tokens == context_len.shape[0]
    max_new = _most_new(num_tokens, context_len.shape[0], group)
    chunks = list_chunks(
        query_start,
        context_len,
        window,
        max_new=max_new,
        all_rows=is_decode,
        unit=few.tile_keys,
        min_chunk=few.min_chunk,
        num_extra=few.num_extra(K, table_width * C),
        num_kv_heads=K,
    )
    if is_decode:
        return AttentionPlan(chunks, None)
    cut = {"min_new": max_new + 1, "tile": many.tile_tokens(group), "align": align}
    return AttentionPlan(chunks, list_tiles(query_start, context_len, window, num_tokens, **cut))


def _most_new(num_tokens: int, num_requests: int, group: int) -> int:
    """How many new tokens still are few: so many that their heads fill the rows of a matrix product."""
    return 1 if num_tokens == num_requests else max(1, triton_decode.MIN_ROWS // group)
