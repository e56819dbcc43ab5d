"""Ragged paged attention in Triton, for any card: who brings few new tokens takes one kernel, who brings many another.

Knows the same as the reference. Refuses to know how a kernel works.
"""

from collections.abc import Callable
from typing import Protocol

import jax
from jaxtyping import Array, Float, Int

from jaxllm.kernels.paged_attention import triton_decode, triton_prefill
from jaxllm.kernels.paged_attention.tuning import DecodeConfig, decode_config, prefill_config
from jaxllm.kernels.paged_attention.work_list import list_chunks, list_tiles


class ConfigForMany(Protocol):
    """Constants of a kernel for many new tokens."""

    def tile_tokens(self, group: int) -> int: ...


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
) -> Float[Array, "T N H"]:
    """Causal attention of each request's new tokens over its own context; see the reference."""
    types = (query.dtype, kv_cache.dtype)
    few, many = decode_config(query.shape[2], *types, block_table.shape[0]), prefill_config(query.shape[2], *types)
    arguments = (query, kv_cache, layer, block_table, query_start, context_len)
    return attend(few, many, *arguments, scale, window=window, softcap=softcap, sinks=sinks)


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
    prefill: Callable = triton_prefill.prefill,
    align: int = 1,
) -> Float[Array, "T N H"]:
    """The same with the constants for few and for many new tokens given, the kernel for many, and its tiles' alignment.

    In a mixed batch (T != B) the tiles are computed first, and the chunks add their rows to the same array.
    """
    T, N, _ = query.shape
    K, C = kv_cache.shape[3:5]
    B, M = block_table.shape
    is_decode = T == B
    max_new = 1 if is_decode else max(1, triton_decode.MIN_ROWS * K // N)
    chunks = list_chunks(
        query_start,
        context_len,
        window,
        max_new=max_new,
        all_rows=is_decode,
        unit=few.tile_keys,
        min_chunk=few.min_chunk,
        num_extra=few.num_extra(K, M * C),
    )
    arguments = (query, kv_cache, layer, block_table)
    options = {"scale": scale, "window": window, "softcap": softcap}
    if sinks is not None:  # not every kernel for many tokens knows them
        options["sinks"] = sinks
    attended_TNH: jax.Array | None = None
    if not is_decode:
        tile = many.tile_tokens(N // K)
        tiles = list_tiles(query_start, context_len, window, T, min_new=max_new + 1, tile=tile, align=align)
        attended_TNH = prefill(*arguments, tiles, **options, config=many)
    return triton_decode.decode(
        *arguments, query_start, context_len, chunks, max_new=max_new, **options, config=few, out=attended_TNH
    )
