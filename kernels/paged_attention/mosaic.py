"""Ragged paged attention for Hopper: many new tokens take Pallas Mosaic GPU, few take the Triton decode kernel.

Knows the same as the reference. Batches that the Mosaic kernel is not made for take Triton for everything.
"""

import functools
import logging

from jaxtyping import Array, Float, Int

from jaxllm.kernels.paged_attention import mosaic_prefill, triton
from jaxllm.kernels.paged_attention.mosaic_prefill import MosaicConfig
from jaxllm.kernels.paged_attention.tuning import decode_config

logger = logging.getLogger(__name__)

MIN_TOKENS = 256  # fewer are soon done, and each batch size costs seconds of compilation


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
    T, _, H = query.shape
    arguments = (query, kv_cache, layer, block_table, query_start, context_len)
    is_decode = block_table.shape[0] == T
    is_small = is_decode or T < MIN_TOKENS
    obstacle = mosaic_prefill.find_obstacle(T, H, kv_cache.shape[4], query.dtype, kv_cache.dtype)
    if sinks is not None:
        obstacle = "it knows no attention sinks"
    if not is_small and obstacle:
        _log_once(obstacle)
    if is_small or obstacle:
        return triton.paged_attention(*arguments, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return attend(mosaic_prefill.choose_config(H), *arguments, scale, window=window, softcap=softcap)


def attend(
    many: MosaicConfig,
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
) -> Float[Array, "T N H"]:
    """The same for sizes that Mosaic takes, with the constants for many new tokens given."""
    return triton.attend(
        decode_config(query.shape[2], query.dtype, kv_cache.dtype),
        many,
        query,
        kv_cache,
        layer,
        block_table,
        query_start,
        context_len,
        scale,
        window=window,
        softcap=softcap,
        prefill=functools.partial(mosaic_prefill.prefill, context_len=context_len),
        align=mosaic_prefill.ALIGNMENT,
    )


@functools.cache
def _log_once(obstacle: str) -> None:
    logger.warning("paged_attention: mosaic leaves many new tokens to triton: %s", obstacle)
