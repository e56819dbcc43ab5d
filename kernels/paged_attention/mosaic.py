"""Ragged paged attention for Hopper: many new tokens take Pallas Mosaic GPU, few take the Triton decode kernel.

Knows the same as the reference. Batches that the Mosaic kernel is not made for take Triton for everything.
"""

import functools
import logging

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.kernels.paged_attention import mosaic_prefill, triton
from jaxllm.kernels.paged_attention.mosaic_prefill import MosaicConfig
from jaxllm.kernels.paged_attention.triton import AttentionPlan
from jaxllm.kernels.paged_attention.tuning import decode_config

logger = logging.getLogger(__name__)

MIN_TOKENS = 256  # fewer are soon done, and each batch size costs seconds of compilation


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
    """The lists of work for a batch and a window, with tiles as the kernel wants them that will take it."""
    T, B, H = num_tokens, context_len.shape[0], kv_cache.shape[5]
    lengths = (kv_cache, query_start, context_len)
    if not _takes(T, B, dtype, kv_cache, has_sinks):
        sizes = {"num_tokens": T, "table_width": table_width, "group": group, "dtype": dtype}
        return triton.plan_attention(*lengths, **sizes, window=window, has_sinks=has_sinks)
    few, many = decode_config(H, dtype, kv_cache.dtype), mosaic_prefill.choose_config(H)
    return triton.list_work(few, many, *lengths, T, table_width, group, window, align=mosaic_prefill.ALIGNMENT)


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
    T, _, H = query.shape
    arguments = (query, kv_cache, layer, block_table, query_start, context_len)
    if not _takes(T, block_table.shape[0], query.dtype, kv_cache, sinks is not None):
        return triton.paged_attention(*arguments, scale=scale, window=window, softcap=softcap, sinks=sinks, plan=plan)
    return attend(mosaic_prefill.choose_config(H), *arguments, scale, window=window, softcap=softcap, plan=plan)


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
    plan: AttentionPlan | None = None,
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
        plan=plan,
        prefill=functools.partial(mosaic_prefill.prefill, context_len=context_len),
        align=mosaic_prefill.ALIGNMENT,
    )


def _takes(num_tokens: int, num_requests: int, dtype: jnp.dtype, kv_cache: Array, has_sinks: bool) -> bool:
    """Tells whether the batch is one for the Mosaic kernel; says once why a large one is not."""
    if num_tokens == num_requests or num_tokens < MIN_TOKENS:
        return False
    C, H = kv_cache.shape[4:]
    obstacle = mosaic_prefill.find_obstacle(num_tokens, H, C, dtype, kv_cache.dtype)
    if has_sinks:
        obstacle = "it knows no attention sinks"
    if obstacle:
        _log_once(obstacle)
    return not obstacle


@functools.cache
def _log_once(obstacle: str) -> None:
    logger.warning("paged_attention: mosaic leaves many new tokens to triton: %s", obstacle)
