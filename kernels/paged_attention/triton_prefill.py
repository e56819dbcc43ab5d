"""Attention of requests with many new tokens, in Triton: tiles of new tokens over the paged context.

Knows one layer's queries, the block table and a list of tiles. Refuses to know which requests take another kernel.

A program handles one tile for one KV head: its rows are the tile's tokens times the query heads of the group, so that
each key is read once for all of them (Dao, 2023, "FlashAttention-2"). Keys that all rows see go without masks.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from jaxllm.kernels.e4m3.reference import E4M3
from jaxllm.kernels.e4m3.triton import as_float16, as_numbers, has_conversions
from jaxllm.kernels.launch import launch
from jaxllm.kernels.paged_attention.triton_softmax import attend_keys, begin_softmax
from jaxllm.kernels.paged_attention.tuning import PrefillConfig
from jaxllm.kernels.paged_attention.work_list import TileList


@triton.jit
def prefill_tiles(
    query,
    kv_cache,
    layer,
    block_table,
    tile,
    window,
    sinks,
    M,
    P,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    C: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_E4M3: tl.constexpr,
    HAS_CONVERSIONS: tl.constexpr,
):
    """Handles tile program_id // K for KV head program_id % K. Row r is head r % G of the tile's token r // G."""
    G: tl.constexpr = N // K
    piece = tl.program_id(0) // K
    head = tl.program_id(0) % K
    b = tl.load(tile + piece * 4)
    if b >= 0:
        first_token = tl.load(tile + piece * 4 + 1)
        num_tokens = tl.load(tile + piece * 4 + 2)
        position = tl.load(tile + piece * 4 + 3)
        r_R = tl.arange(0, TILE_ROWS)
        d_H = tl.arange(0, H_PADDED)
        row_mask_RH = (r_R < num_tokens * G)[:, None] & (d_H[None, :] < H)
        row_RH = ((first_token + r_R // G).to(tl.int64) * N + head * G + r_R % G)[:, None] * H + d_H[None, :]
        q_RH = tl.load(query + row_RH, mask=row_mask_RH, other=0.0)
        if IS_E4M3:
            q_RH = as_float16(q_RH)  # e4m3 widens to it at no cost, to bfloat16 it does not
        position_R = position + r_R // G
        # All rows see the keys clear_begin:clear_end; those before and behind need a look at each row.
        end = tl.maximum(position + num_tokens, 0)
        clear_end = tl.maximum(position + 1, 0) // TILE_KEYS * TILE_KEYS
        begin = 0
        clear_begin = 0
        oldest_R = position_R
        if HAS_WINDOW:
            width = tl.load(window)
            oldest_R = position_R - width + 1
            begin = tl.minimum(tl.maximum(position - width + 1, 0), end) // TILE_KEYS * TILE_KEYS
            clear_begin = tl.cdiv(tl.maximum(position + num_tokens - width, 0), TILE_KEYS) * TILE_KEYS
            clear_begin = tl.minimum(clear_begin, tl.cdiv(end, TILE_KEYS) * TILE_KEYS)
            clear_end = tl.maximum(clear_begin, clear_end)
        base = as_numbers(kv_cache, HAS_CONVERSIONS)
        base += tl.load(layer).to(tl.int64) * P * (2 * K * C * H) + head * (C * H)
        table = block_table + b * M
        best_R, total_R = begin_softmax(sinks, head * G + r_R % G, True, HAS_SINKS)
        acc_RH = tl.zeros([TILE_ROWS, H_PADDED], tl.float32)
        if HAS_WINDOW:
            best_R, total_R, acc_RH = attend_keys(
                q_RH,
                base,
                table,
                begin,
                tl.minimum(clear_begin, end),
                position_R,
                oldest_R,
                best_R,
                total_R,
                acc_RH,
                K,
                H,
                H_PADDED,
                C,
                TILE_KEYS,
                SCALE,
                SOFTCAP,
                True,
                True,
                True,
                True,
                PRECISION,
            )
        best_R, total_R, acc_RH = attend_keys(
            q_RH,
            base,
            table,
            clear_begin,
            clear_end,
            position_R,
            oldest_R,
            best_R,
            total_R,
            acc_RH,
            K,
            H,
            H_PADDED,
            C,
            TILE_KEYS,
            SCALE,
            SOFTCAP,
            False,
            False,
            False,
            False,
            PRECISION,
        )
        best_R, total_R, acc_RH = attend_keys(
            q_RH,
            base,
            table,
            clear_end,
            end,
            position_R,
            oldest_R,
            best_R,
            total_R,
            acc_RH,
            K,
            H,
            H_PADDED,
            C,
            TILE_KEYS,
            SCALE,
            SOFTCAP,
            HAS_WINDOW,
            True,
            True,
            HAS_WINDOW,
            PRECISION,
        )
        out_RH = acc_RH / tl.where(total_R == 0.0, 1.0, total_R)[:, None]
        tl.store(out + row_RH, out_RH.to(out.dtype.element_ty), mask=row_mask_RH)


def prefill(
    query: Float[Array, "T N H"],
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    tiles: TileList,
    *,
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None = None,
    config: PrefillConfig,
) -> Float[Array, "T N H"]:
    """Attention of the tokens in the list of tiles; the others' rows are left unwritten."""
    N, H = query.shape[1:]
    P, _, K, C = kv_cache.shape[1:5]
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    window_1 = layer_1 if window is None else jnp.asarray(window, jnp.int32).reshape(1)
    (attended_TNH,) = launch(
        prefill_tiles,
        query,
        kv_cache,
        layer_1,
        block_table,
        tiles.tile,
        window_1,
        layer_1 if sinks is None else sinks.astype(jnp.float32),
        block_table.shape[1],
        P,
        results=(jax.ShapeDtypeStruct(query.shape, query.dtype),),
        grid=tiles.tile.shape[0] * K,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        N=N,
        K=K,
        H=H,
        H_PADDED=triton.next_power_of_2(H),
        C=C,
        TILE_ROWS=max(config.tile_rows, triton.next_power_of_2(N // K)),
        TILE_KEYS=config.tile_keys,
        SCALE=scale,
        SOFTCAP=softcap,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        PRECISION="ieee" if query.dtype == jnp.float32 else None,
        IS_E4M3=kv_cache.dtype == E4M3,
        HAS_CONVERSIONS=has_conversions(),
    )
    return attended_TNH
