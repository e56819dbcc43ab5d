"""Attention of requests with few new tokens, in Triton: flash decoding over chunks of the contexts.

Knows one layer's queries, the block table and a list of chunks. Refuses to know which requests take another kernel.

A program handles one chunk for one KV head, all query heads of the group and all new tokens together as the rows of one
matrix product, with an online softmax (Dao et al., 2023, "Flash-Decoding for long-context inference"). A request whose
context is one chunk is done then; the others' parts wait in float32 for whoever of them ends last.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Int

from jaxllm.kernels.e4m3.reference import E4M3
from jaxllm.kernels.e4m3.triton import has_conversions
from jaxllm.kernels.launch import launch
from jaxllm.kernels.paged_attention.triton_combine import combine_if_last, parts_at_once
from jaxllm.kernels.paged_attention.triton_decode_e4m3 import decode_e4m3_chunks
from jaxllm.kernels.paged_attention.triton_softmax import attend_keys, begin_softmax
from jaxllm.kernels.paged_attention.tuning import DecodeConfig
from jaxllm.kernels.paged_attention.work_list import ChunkList

MIN_ROWS = 16  # of a matrix product


@triton.jit
def decode_chunks(
    query,
    kv_cache,
    layer,
    block_table,
    query_start,
    context_len,
    chunk,
    first,
    count,
    arrived,
    window,
    sinks,
    M,
    P,
    out,
    part_out,
    part_lse,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_2: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Handles chunk program_id // K for KV head program_id % K. Row r is head r % G of the new token r // G."""
    G: tl.constexpr = N // K
    piece = tl.program_id(0) // K
    head = tl.program_id(0) % K
    b = tl.load(chunk + piece * 4)
    if b >= 0:
        begin = tl.load(chunk + piece * 4 + 1)
        end = tl.load(chunk + piece * 4 + 2)
        first_token = tl.load(query_start + b)
        num_new = tl.load(query_start + b + 1) - first_token
        length = tl.load(context_len + b)
        r_R = tl.arange(0, ROWS_PADDED)
        d_H = tl.arange(0, H_PADDED)
        is_row_R = r_R < tl.minimum(num_new * G, ROWS)
        row_mask_RH = is_row_R[:, None] & (d_H[None, :] < H)
        row_RH = ((first_token + r_R // G).to(tl.int64) * N + head * G + r_R % G)[:, None] * H + d_H[None, :]
        q_RH = tl.load(query + row_RH, mask=row_mask_RH, other=0.0)
        position_R = length - num_new + r_R // G
        oldest_R = position_R * 0
        if HAS_WINDOW:
            oldest_R = position_R - tl.load(window) + 1
        base = kv_cache + tl.load(layer).to(tl.int64) * P * (2 * K * C * H) + head * (C * H)
        is_alone = True
        if IS_SPLIT:
            is_alone = tl.load(chunk + piece * 4 + 3) == 0
        best_R, total_R = begin_softmax(sinks, head * G + r_R % G, is_alone, HAS_SINKS)
        acc_RH = tl.zeros([ROWS_PADDED, H_PADDED], tl.float32)
        best_R, total_R, acc_RH = attend_keys(
            q_RH,
            base,
            block_table + b * M,
            begin,
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
            HAS_WINDOW or ROWS > G,
            HAS_WINDOW or ROWS > G,
            PRECISION,
        )
        is_empty_R = total_R == 0.0
        out_RH = acc_RH / tl.where(is_empty_R, 1.0, total_R)[:, None]
        if is_alone:
            tl.store(out + row_RH, out_RH.to(out.dtype.element_ty), mask=row_mask_RH)
        if IS_SPLIT:  # noqa: SIM102 - one is known when compiling, the other is not
            if not is_alone:
                part_R = (piece * K + head).to(tl.int64) * ROWS + r_R
                lse_R = tl.where(is_empty_R, float("-inf"), best_R + tl.log2(tl.where(is_empty_R, 1.0, total_R)))
                tl.store(part_out + part_R[:, None] * H + d_H[None, :], out_RH, mask=row_mask_RH)
                tl.store(part_lse + part_R, lse_R, mask=is_row_R)
                combine_if_last(
                    arrived + b * K + head,
                    part_out,
                    part_lse,
                    tl.load(first + b),
                    tl.load(count + b),
                    first_token,
                    tl.minimum(num_new * G, ROWS),
                    head,
                    sinks,
                    out,
                    N,
                    K,
                    H,
                    H_PADDED,
                    ROWS,
                    ROWS_2,
                    HAS_SINKS,
                    AT_ONCE,
                )


def decode(
    query: Float[Array, "T N H"],
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    block_table: Int[Array, "B M"],
    query_start: Int[Array, " B+1"],
    context_len: Int[Array, " B"],
    chunks: ChunkList,
    *,
    max_new: int,
    scale: float,
    window: int | Int[Array, ""] | None,
    softcap: float | None,
    sinks: Float[Array, " N"] | None = None,
    config: DecodeConfig,
    out: Float[Array, "T N H"] | None = None,
) -> Float[Array, "T N H"]:
    """Attention of the requests in the list of chunks; the others' rows stay as they are in `out`, or unwritten."""
    _, N, H = query.shape
    P, _, K, C = kv_cache.shape[1:5]
    B, M = block_table.shape
    W = chunks.chunk.shape[0]
    rows = max_new * N // K
    is_split = W > B
    sizes = {"N": N, "K": K, "H": H, "H_PADDED": triton.next_power_of_2(H), "ROWS": rows}
    sizes["ROWS_2"] = triton.next_power_of_2(rows)
    layer_1 = jnp.asarray(layer, jnp.int32).reshape(1)
    window_1 = layer_1 if window is None else jnp.asarray(window, jnp.int32).reshape(1)
    has_sinks = sinks is not None
    sinks_N = layer_1 if sinks is None else sinks.astype(jnp.float32)
    operands = (query, kv_cache, layer_1, block_table, query_start, context_len, *chunks, window_1, sinks_N, M, P)
    out_type = jax.ShapeDtypeStruct(query.shape, query.dtype)
    part = (W, K, rows) if is_split else (1, 1, 1)
    is_packed = kv_cache.dtype == E4M3
    attended_TNH, _, _ = launch(
        decode_e4m3_chunks if is_packed else decode_chunks,
        *(operands if out is None else (*operands, out)),
        results=(
            out_type,
            jax.ShapeDtypeStruct((*part, H), jnp.float32),
            jax.ShapeDtypeStruct(part, jnp.float32),
        ),
        aliases={} if out is None else {len(operands): 0},
        grid=W * K,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
        **sizes,
        **({"HAS_CONVERSIONS": has_conversions()} if is_packed else {}),
        C=C,
        ROWS_PADDED=max(MIN_ROWS, triton.next_power_of_2(rows)),
        TILE_KEYS=config.tile_keys,
        SCALE=scale,
        SOFTCAP=softcap,
        HAS_WINDOW=window is not None,
        HAS_SINKS=has_sinks,
        IS_SPLIT=is_split,
        AT_ONCE=parts_at_once(rows, H, config.num_warps),
        PRECISION="ieee" if query.dtype == jnp.float32 else None,
    )
    return attended_TNH
