"""Ragged paged attention for Hopper: many new tokens take Pallas Mosaic GPU, few take the Triton decode kernel.

Knows the same as the reference, and which sizes the Mosaic kernel is made for; others take Triton for everything.
"""

import functools
import logging

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.kernels.paged_attention import mosaic_prefill, triton
from jaxllm.kernels.paged_attention.mosaic_prefill import MosaicConfig
from jaxllm.kernels.paged_attention.tuning import decode_config

logger = logging.getLogger(__name__)

BLOCK_SIZES = (16, 32, 64, 128)  # a page is copied whole, and a tile of keys holds whole pages
HEAD_DIMS = (64, 128)
MIN_TOKENS = 128  # a batch with fewer fills no tile's rows


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
) -> Float[Array, "T N H"]:
    """Causal attention of each request's new tokens over its own context; see the reference."""
    T, _, H = query.shape
    arguments = (query, kv_cache, layer, block_table, query_start, context_len)
    is_small = T == block_table.shape[0] or T < MIN_TOKENS  # a decode batch, or few new tokens
    obstacle = find_obstacle(T, H, kv_cache.shape[4], query.dtype, kv_cache.dtype)
    if not is_small and obstacle:
        _log_once(obstacle)
    if is_small or obstacle:
        return triton.paged_attention(*arguments, scale=scale, window=window, softcap=softcap)
    return attend(mosaic_config(H), *arguments, scale, window=window, softcap=softcap)


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
        decode_config(query.shape[2], query.dtype),
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


def find_obstacle(
    num_tokens: int, head_dim: int, block_size: int, dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> str | None:
    """Says in a few words why Mosaic does not take batches of these sizes and types; None where it does."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 and float16, not {jnp.dtype(dtype).name}"
    if cache_dtype != dtype:
        return f"the cache is {jnp.dtype(cache_dtype).name}, the queries are {jnp.dtype(dtype).name}"
    if head_dim not in HEAD_DIMS:
        return f"the head size is {head_dim}, not one of {_join(HEAD_DIMS)}"
    if block_size not in BLOCK_SIZES:
        return f"the block size is {block_size}, not one of {_join(BLOCK_SIZES)}"
    if num_tokens % mosaic_prefill.ALIGNMENT:
        return f"the batch's {num_tokens} tokens are no multiple of {mosaic_prefill.ALIGNMENT}"
    return None


def mosaic_config(head_dim: int) -> MosaicConfig:
    """Constants whose buffers fit the 227 KiB of shared memory of a block."""
    return MosaicConfig(num_buffers=4 if head_dim <= 64 else 2)


@functools.cache
def _log_once(obstacle: str) -> None:
    logger.warning("paged_attention: mosaic leaves many new tokens to triton: %s", obstacle)


def _join(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
