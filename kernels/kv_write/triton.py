"""The scatter of new keys and values in Triton, in place. Knows slots only: not which request a slot belongs to."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from jaxllm.kernels.e4m3.triton import as_numbers, has_conversions, narrowed
from jaxllm.kernels.launch import launch

TILE_ROWS = 16


@triton.jit
def write_rows(
    kv_cache,
    layer,
    key,
    value,
    block,
    offset,
    num_rows,
    P,
    K: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_CONVERSIONS: tl.constexpr,
):
    """Copies TILE_ROWS rows of one head each to the slots of their tokens."""
    kv_cache = as_numbers(kv_cache, HAS_CONVERSIONS)
    row_R = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    d_H = tl.arange(0, H_PADDED)
    is_row_R = row_R < num_rows
    mask_RH = is_row_R[:, None] & (d_H < H)[None, :]
    token_R = row_R // K
    block_R = tl.load(block + token_R, mask=is_row_R, other=0).to(tl.int64)
    offset_R = tl.load(offset + token_R, mask=is_row_R, other=0)
    source_RH = row_R.to(tl.int64)[:, None] * H + d_H[None, :]
    slot_R = (tl.load(layer).to(tl.int64) * P + block_R) * (2 * K * C * H) + (row_R % K * C + offset_R) * H
    target_RH = kv_cache + slot_R[:, None] + d_H[None, :]
    cached: tl.constexpr = kv_cache.dtype.element_ty
    key_RH = tl.load(key + source_RH, mask=mask_RH)
    value_RH = tl.load(value + source_RH, mask=mask_RH)
    tl.store(target_RH, narrowed(key_RH, cached), mask=mask_RH)
    tl.store(target_RH + K * C * H, narrowed(value_RH, cached), mask=mask_RH)


def kv_write(
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    block: Int[Array, " T"],
    offset: Int[Array, " T"],
) -> Float[Array, "L P 2 K C H"]:
    """Stores each token's key and value at (layer, block, offset). Padding tokens name block 0, which nobody reads.

    They are cast to the type of the cache; one of bytes keeps e4m3 numbers, which saturate.
    """
    T, K, H = key.shape
    P, _, _, C = kv_cache.shape[1:5]
    (kv_cache,) = launch(
        write_rows,
        kv_cache,
        jnp.asarray(layer, jnp.int32).reshape(1),
        key,
        value,
        block,
        offset,
        T * K,
        P,
        results=(jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),),
        aliases={0: 0},
        grid=triton.cdiv(T * K, TILE_ROWS),
        K=K,
        H=H,
        H_PADDED=triton.next_power_of_2(H),
        C=C,
        TILE_ROWS=TILE_ROWS,
        HAS_CONVERSIONS=has_conversions(),
    )
    return kv_cache
