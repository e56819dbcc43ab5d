"""The constants of the Triton kernels for a head size and a type. What chose them: scripts/bench_kernels.py --sweep."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxllm.kernels.e4m3.reference import E4M3
from jaxllm.kernels.launch import capability


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Keys of one turn of the loop, the shortest chunk, and how many programs the long contexts are split for."""

    tile_keys: int = 64
    num_warps: int = 4
    num_stages: int = 4
    min_chunk: int = 128
    num_programs: int = 1024
    max_registers: int | None = None  # of a thread: adding up parts, a rare thing, would take more

    def num_extra(self, num_kv_heads: int, longest: int) -> int:
        """How many chunks there may be beyond one for each request; none where no context reaches min_chunk."""
        return 0 if longest <= self.min_chunk else -(-self.num_programs // num_kv_heads)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Rows of a tile and keys of one turn of the loop."""

    tile_rows: int = 128
    tile_keys: int = 64
    num_warps: int = 8
    num_stages: int = 3

    def tile_tokens(self, group: int) -> int:
        """Tokens whose heads fill the rows of a tile."""
        return max(1, self.tile_rows // group)


def decode_config(
    head_dim: int, dtype: jnp.dtype, cache_dtype: jnp.dtype | None = None, num_requests: int = 1
) -> DecodeConfig:
    """Constants whose tiles fit the shared memory of every card from sm_80 on (99 KiB on sm_86 and sm_89).

    float32 is multiplied without tensor cores, unrolled: larger tiles than these spill.
    """
    is_wide = head_dim > 128
    if _has_32_bits(dtype, cache_dtype):
        return DecodeConfig(tile_keys=16 if is_wide else 32, num_warps=8 if is_wide else 4, num_stages=2)
    # On an H200. Programs without a chunk cost a single request as much as its keys do. Two or more requests want many
    # small programs; one wants its tile's keys on their way at once (docs/log.md, 2026-11-30).
    if cache_dtype == E4M3:
        if num_requests == 1:
            return DecodeConfig(num_stages=2, min_chunk=64, num_programs=128)
        if num_requests <= 8:
            return DecodeConfig(tile_keys=16, num_warps=1, num_stages=6, min_chunk=64, num_programs=512)
        return DecodeConfig(tile_keys=32, num_warps=2, num_stages=5, min_chunk=64)
    if num_requests == 1 and not is_wide:
        return DecodeConfig(num_stages=2, min_chunk=64, num_programs=128, max_registers=128)
    most = None if is_wide else 128
    return DecodeConfig(tile_keys=16, num_warps=2, num_stages=6, min_chunk=64, num_programs=512, max_registers=most)


def prefill_config(head_dim: int, dtype: jnp.dtype, cache_dtype: jnp.dtype | None = None) -> PrefillConfig:
    """The same for tiles of new tokens."""
    is_wide = head_dim > 128
    if _has_32_bits(dtype, cache_dtype):
        rows = 16 if is_wide else 32
        num_warps = 8 if is_wide or cache_dtype == E4M3 else 4
        return PrefillConfig(tile_rows=rows, tile_keys=rows, num_warps=num_warps, num_stages=2)
    if is_wide:
        return PrefillConfig(tile_rows=64, tile_keys=32, num_warps=4, num_stages=2)
    # Hopper's shared memory (227 KiB) has room for twice the rows.
    return PrefillConfig(tile_rows=256 if head_dim <= 128 and capability() >= 90 else 128)


def _has_32_bits(*dtypes: jnp.dtype | None) -> bool:
    """Tells whether queries or cache have 32 bits; a cache of no type has the queries'."""
    return any(dtype is not None and jnp.dtype(dtype).itemsize == 4 for dtype in dtypes)
