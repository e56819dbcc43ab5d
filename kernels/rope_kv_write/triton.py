"""Bias, head norms, rotary embedding and KV write in one Triton kernel, the cache in place.

Knows rows: one head of one token each, a query, a key or a value. Refuses to know attention.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from jaxllm.kernels.e4m3.triton import as_numbers, has_conversions, narrowed
from jaxllm.kernels.launch import launch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rows of a program."""

    tile_rows: int = 16
    num_warps: int = 4


@triton.jit
def turn_rows(
    kv_cache,
    layer,
    qkv,
    cos,
    sin,
    block,
    offset,
    bias,
    q_norm,
    k_norm,
    kv_scale,
    param_layer,
    num_rows,
    P,
    query,
    K: tl.constexpr,
    J: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_CONVERSIONS: tl.constexpr,
    EPS: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
):
    """Row (token, KV head, j) of qkv goes to the queries (j < G) or to the cache; features i, i + R turn together."""
    G: tl.constexpr = J - 2
    type = qkv.dtype.element_ty
    own = tl.load(param_layer)
    bias += own * (K * J * H)
    q_norm += own * H
    k_norm += own * H
    kv_cache = as_numbers(kv_cache, HAS_CONVERSIONS)
    row_X = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row_X = row_X < num_rows
    token_X = row_X // (K * J)
    head_X = row_X // J % K
    j_X = row_X % J
    is_value_X = j_X == J - 1
    is_query_X = is_row_X & (j_X < G)
    is_cached_X = is_row_X & (j_X >= G)
    block_X = tl.load(block + token_X, mask=is_row_X, other=0).to(tl.int64)
    offset_X = tl.load(offset + token_X, mask=is_row_X, other=0)
    slot_X = (tl.load(layer).to(tl.int64) * P + block_X) * (2 * K * C * H)
    slot_X += (tl.where(is_value_X, K, 0) + head_X) * (C * H) + offset_X * H
    query_row_X = (token_X.to(tl.int64) * (K * G) + head_X * G + j_X) * H
    i_R = tl.arange(0, R_PADDED)
    mask_XR = is_row_X[:, None] & (i_R < R)[None, :]
    source_XR = qkv + row_X.to(tl.int64)[:, None] * H + i_R[None, :]
    first_XR = tl.load(source_XR, mask=mask_XR, other=0.0)
    second_XR = tl.load(source_XR + R, mask=mask_XR, other=0.0)
    turn_XR = token_X[:, None] * R + i_R[None, :]
    turns_XR = mask_XR & (j_X < J - 1)[:, None]
    cos_XR = tl.load(cos + turn_XR, mask=turns_XR, other=1.0)
    sin_XR = tl.load(sin + turn_XR, mask=turns_XR, other=0.0)
    if HAS_BIAS:
        bias_XR = bias + ((row_X % (K * J)) * H)[:, None] + i_R[None, :]
        first_XR = (first_XR.to(tl.float32) + tl.load(bias_XR, mask=mask_XR, other=0.0).to(tl.float32)).to(type)
        second_XR = (second_XR.to(tl.float32) + tl.load(bias_XR + R, mask=mask_XR, other=0.0).to(tl.float32)).to(type)
    if REST_PADDED > 0:
        o_O = 2 * R + tl.arange(0, REST_PADDED)
        mask_XO = is_row_X[:, None] & (o_O < H)[None, :]
        rest_XO = tl.load(qkv + row_X.to(tl.int64)[:, None] * H + o_O[None, :], mask=mask_XO, other=0.0)
        if HAS_BIAS:
            bias_XO = tl.load(bias + ((row_X % (K * J)) * H)[:, None] + o_O[None, :], mask=mask_XO, other=0.0)
            rest_XO = (rest_XO.to(tl.float32) + bias_XO.to(tl.float32)).to(type)
    if HAS_NORM:
        square_X = tl.sum(first_XR.to(tl.float32) * first_XR.to(tl.float32), 1)
        square_X += tl.sum(second_XR.to(tl.float32) * second_XR.to(tl.float32), 1)
        if REST_PADDED > 0:
            square_X += tl.sum(rest_XO.to(tl.float32) * rest_XO.to(tl.float32), 1)
        scale_X = tl.rsqrt(square_X / H + EPS)
        first_XR = normed(first_XR, scale_X, j_X, q_norm, k_norm, i_R, i_R < R, G, NORM_OFFSET)
        second_XR = normed(second_XR, scale_X, j_X, q_norm, k_norm, R + i_R, i_R < R, G, NORM_OFFSET)
        if REST_PADDED > 0:
            rest_XO = normed(rest_XO, scale_X, j_X, q_norm, k_norm, o_O, o_O < H, G, NORM_OFFSET)
    a_XR = first_XR.to(tl.float32)
    b_XR = second_XR.to(tl.float32)
    first_XR = (a_XR * cos_XR - b_XR * sin_XR).to(type)
    second_XR = (b_XR * cos_XR + a_XR * sin_XR).to(type)
    if HAS_SCALE:
        k_scale = tl.load(kv_scale)
        stored = tl.div_rn(1.0, tl.where(is_value_X, tl.load(kv_scale + 1), k_scale))
        factor_X = tl.where(j_X < G, k_scale, stored)
        first_XR = first_XR.to(tl.float32) * factor_X[:, None]
        second_XR = second_XR.to(tl.float32) * factor_X[:, None]
        if REST_PADDED > 0:
            rest_XO = rest_XO.to(tl.float32) * factor_X[:, None]
    cached: tl.constexpr = kv_cache.dtype.element_ty
    to_query_XR = query + query_row_X[:, None] + i_R[None, :]
    to_cache_XR = kv_cache + slot_X[:, None] + i_R[None, :]
    tl.store(to_query_XR, first_XR.to(type), mask=mask_XR & is_query_X[:, None])
    tl.store(to_query_XR + R, second_XR.to(type), mask=mask_XR & is_query_X[:, None])
    tl.store(to_cache_XR, narrowed(first_XR, cached), mask=mask_XR & is_cached_X[:, None])
    tl.store(to_cache_XR + R, narrowed(second_XR, cached), mask=mask_XR & is_cached_X[:, None])
    if REST_PADDED > 0:
        to_query_XO = query + query_row_X[:, None] + o_O[None, :]
        tl.store(to_query_XO, rest_XO.to(type), mask=mask_XO & is_query_X[:, None])
        to_rest_XO = kv_cache + slot_X[:, None] + o_O[None, :]
        tl.store(to_rest_XO, narrowed(rest_XO, cached), mask=mask_XO & is_cached_X[:, None])


@triton.jit
def normed(x_XF, scale_X, j_X, q_norm, k_norm, f_F, is_feature_F, G: tl.constexpr, NORM_OFFSET: tl.constexpr):
    """Scales features of queries and keys; values pass."""
    q_F = tl.load(q_norm + f_F, mask=is_feature_F, other=0.0).to(tl.float32)
    k_F = tl.load(k_norm + f_F, mask=is_feature_F, other=0.0).to(tl.float32)
    weight_XF = NORM_OFFSET + tl.where((j_X < G)[:, None], q_F[None, :], k_F[None, :])
    normed_XF = (x_XF.to(tl.float32) * scale_X[:, None] * weight_XF).to(x_XF.dtype)
    return tl.where((j_X <= G)[:, None], normed_XF, x_XF)


def rope_kv_write(
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    qkv: Float[Array, "T K J H"],
    cos: Float[Array, "T R"],
    sin: Float[Array, "T R"],
    block: Int[Array, " T"],
    offset: Int[Array, " T"],
    *,
    bias: Float[Array, "*L K J H"] | None = None,
    q_norm: Float[Array, "*L H"] | None = None,
    k_norm: Float[Array, "*L H"] | None = None,
    param_layer: int | Int[Array, ""] | None = None,
    kv_scale: Float[Array, "2"] | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P 2 K C H"]]:
    """Gives the queries and the cache with each token's key and value at (layer, block, offset); see the reference."""
    return turn_and_write(
        RopeConfig(),
        kv_cache,
        layer,
        qkv,
        cos,
        sin,
        block,
        offset,
        bias,
        q_norm,
        k_norm,
        kv_scale,
        eps,
        norm_offset,
        param_layer,
    )


def turn_and_write(
    config: RopeConfig,
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    qkv: Float[Array, "T K J H"],
    cos: Float[Array, "T R"],
    sin: Float[Array, "T R"],
    block: Int[Array, " T"],
    offset: Int[Array, " T"],
    bias: Float[Array, "*L K J H"] | None = None,
    q_norm: Float[Array, "*L H"] | None = None,
    k_norm: Float[Array, "*L H"] | None = None,
    kv_scale: Float[Array, "2"] | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
    param_layer: int | Int[Array, ""] | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P 2 K C H"]]:
    """The same with the kernel's constants given."""
    T, K, J, H = qkv.shape
    P, _, _, C = kv_cache.shape[1:5]
    R = cos.shape[1]
    rest = H - 2 * R
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    has_norm = q_norm is not None and k_norm is not None
    kv_cache, query_TNH = launch(
        turn_rows,
        kv_cache,
        layer_1,
        qkv,
        cos,
        sin,
        block,
        offset,
        # What is not there is never read.
        qkv if bias is None else bias,
        q_norm if has_norm else cos,
        k_norm if has_norm else cos,
        cos if kv_scale is None else kv_scale,
        jnp.asarray(0 if param_layer is None else param_layer, jnp.int32).reshape(1),
        T * K * J,
        P,
        results=(
            jax.ShapeDtypeStruct(kv_cache.shape, kv_cache.dtype),
            jax.ShapeDtypeStruct((T, K * (J - 2), H), qkv.dtype),
        ),
        aliases={0: 0},
        grid=triton.cdiv(T * K * J, config.tile_rows),
        num_warps=config.num_warps,
        K=K,
        J=J,
        H=H,
        R=R,
        R_PADDED=triton.next_power_of_2(max(R, 1)),
        REST_PADDED=triton.next_power_of_2(rest) if rest else 0,
        C=C,
        TILE_ROWS=config.tile_rows,
        HAS_BIAS=bias is not None,
        HAS_NORM=has_norm,
        HAS_SCALE=kv_scale is not None,
        HAS_CONVERSIONS=has_conversions(),
        EPS=eps,
        NORM_OFFSET=norm_offset,
    )
    return query_TNH, kv_cache
