"""The decode kernel for a cache of 8-bit numbers (e4m3), which are loaded four at a time and widened in pairs.

Knows what triton_decode.py's kernel knows, and takes the same arguments. Four features that lie in one word go to four
arrays: so the matrix products run over every fourth feature, and the result is kept as four sums, of which number j has
the features 4 i + j. Casting one number after the other instead takes twice the time.
"""

import triton
import triton.language as tl

from jaxllm.kernels.e4m3.triton import as_float16, unpacked
from jaxllm.kernels.paged_attention.triton_combine import combine_if_last
from jaxllm.kernels.paged_attention.triton_softmax import begin_softmax, load_tile


@triton.jit
def decode_e4m3_chunks(
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
    HAS_CONVERSIONS: tl.constexpr,
):
    """Handles chunk program_id // K for KV head program_id % K. Row r is head r % G of the new token r // G."""
    G: tl.constexpr = N // K
    WORDS: tl.constexpr = H // 4
    WORDS_PADDED: tl.constexpr = H_PADDED // 4 if H_PADDED > 64 else 16  # a matrix product takes no less
    IS_PADDED: tl.constexpr = WORDS_PADDED > WORDS
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
        w_W = tl.arange(0, WORDS_PADDED)
        is_row_R = r_R < tl.minimum(num_new * G, ROWS)
        row_mask_RW = is_row_R[:, None] & (w_W[None, :] < WORDS)
        row_RW = ((first_token + r_R // G).to(tl.int64) * N + head * G + r_R % G)[:, None] * H + 4 * w_W[None, :]
        q0_RW = as_float16(tl.load(query + row_RW, mask=row_mask_RW, other=0.0))
        q1_RW = as_float16(tl.load(query + row_RW + 1, mask=row_mask_RW, other=0.0))
        q2_RW = as_float16(tl.load(query + row_RW + 2, mask=row_mask_RW, other=0.0))
        q3_RW = as_float16(tl.load(query + row_RW + 3, mask=row_mask_RW, other=0.0))
        type: tl.constexpr = q0_RW.dtype
        position_R = length - num_new + r_R // G
        oldest_R = position_R * 0
        if HAS_WINDOW:
            oldest_R = position_R - tl.load(window) + 1
        base = kv_cache.to(tl.pointer_type(tl.int32), bitcast=True)
        base += tl.load(layer).to(tl.int64) * P * (2 * K * C * WORDS) + head * (C * WORDS)
        table = block_table + b * M
        is_alone = True
        if IS_SPLIT:
            is_alone = tl.load(chunk + piece * 4 + 3) == 0
        best_R, total_R = begin_softmax(sinks, head * G + r_R % G, is_alone, HAS_SINKS)
        acc0_RW = tl.zeros([ROWS_PADDED, WORDS_PADDED], tl.float32)
        acc1_RW = tl.zeros([ROWS_PADDED, WORDS_PADDED], tl.float32)
        acc2_RW = tl.zeros([ROWS_PADDED, WORDS_PADDED], tl.float32)
        acc3_RW = tl.zeros([ROWS_PADDED, WORDS_PADDED], tl.float32)
        x_X = tl.arange(0, TILE_KEYS)
        is_word_W = w_W[None, :] < WORDS
        for start in range(begin, end, TILE_KEYS):
            key_X = start + x_X
            is_key_X = key_X < end
            if C % TILE_KEYS == 0:  # the tile lies in one block
                block = tl.load(table + start // C).to(tl.int64)
                tile = base + block * (2 * K * C * WORDS) + (start % C) * WORDS
                slot_X = x_X * WORDS
            else:
                tile = base
                block_X = tl.load(table + key_X // C, mask=is_key_X, other=0).to(tl.int64)
                slot_X = block_X * (2 * K * C * WORDS) + (key_X % C) * WORDS
            word_XW = tile + slot_X[:, None] + w_W[None, :]
            k_XW = load_tile(word_XW, is_key_X[:, None], is_word_W, True, IS_PADDED)
            k0_XW, k1_XW, k2_XW, k3_XW = unpacked(k_XW, HAS_CONVERSIONS)
            score_RX = tl.dot(q0_RW, k0_XW.to(type).T, input_precision=PRECISION)
            score_RX = tl.dot(q1_RW, k1_XW.to(type).T, score_RX, input_precision=PRECISION)
            score_RX = tl.dot(q2_RW, k2_XW.to(type).T, score_RX, input_precision=PRECISION)
            score_RX = tl.dot(q3_RW, k3_XW.to(type).T, score_RX, input_precision=PRECISION)
            if SOFTCAP is not None:
                turned_RX = tl.exp2(score_RX * (SCALE * 2.8853900817779268 / SOFTCAP))
                score_RX = (1.0 - 2.0 / (turned_RX + 1.0)) * SOFTCAP
            TO_LOG2: tl.constexpr = (SCALE if SOFTCAP is None else 1.0) * 1.4426950408889634
            seen_RX = is_key_X[None, :]
            if HAS_WINDOW or ROWS > G:
                seen_RX = seen_RX & (key_X[None, :] <= position_R[:, None])
            if HAS_WINDOW:
                seen_RX = seen_RX & (key_X[None, :] >= oldest_R[:, None])
            score_RX = tl.where(seen_RX, score_RX, float("-inf"))
            new_best_R = tl.maximum(best_R, tl.max(score_RX, 1) * TO_LOG2)
            anchor_R = new_best_R
            if HAS_WINDOW or ROWS > G:
                anchor_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
            weight_RX = tl.exp2(score_RX * TO_LOG2 - anchor_R[:, None])
            shrink_R = tl.exp2(best_R - anchor_R)
            total_R = total_R * shrink_R + tl.sum(weight_RX, 1)
            best_R = new_best_R
            v_XW = load_tile(word_XW + K * C * WORDS, is_key_X[:, None], is_word_W, True, IS_PADDED)
            v0_XW, v1_XW, v2_XW, v3_XW = unpacked(v_XW, HAS_CONVERSIONS)
            weight_RX = weight_RX.to(type)
            shrink_R1 = shrink_R[:, None]
            acc0_RW = tl.dot(weight_RX, v0_XW.to(type), acc0_RW * shrink_R1, input_precision=PRECISION)
            acc1_RW = tl.dot(weight_RX, v1_XW.to(type), acc1_RW * shrink_R1, input_precision=PRECISION)
            acc2_RW = tl.dot(weight_RX, v2_XW.to(type), acc2_RW * shrink_R1, input_precision=PRECISION)
            acc3_RW = tl.dot(weight_RX, v3_XW.to(type), acc3_RW * shrink_R1, input_precision=PRECISION)
        is_empty_R = total_R == 0.0
        total_R1 = tl.where(is_empty_R, 1.0, total_R)[:, None]
        if is_alone:
            tl.store(out + row_RW, (acc0_RW / total_R1).to(out.dtype.element_ty), mask=row_mask_RW)
            tl.store(out + row_RW + 1, (acc1_RW / total_R1).to(out.dtype.element_ty), mask=row_mask_RW)
            tl.store(out + row_RW + 2, (acc2_RW / total_R1).to(out.dtype.element_ty), mask=row_mask_RW)
            tl.store(out + row_RW + 3, (acc3_RW / total_R1).to(out.dtype.element_ty), mask=row_mask_RW)
        if IS_SPLIT:  # noqa: SIM102 - one is known when compiling, the other is not
            if not is_alone:
                part_R = (piece * K + head).to(tl.int64) * ROWS + r_R
                part_RW = part_out + part_R[:, None] * H + 4 * w_W[None, :]
                tl.store(part_RW, acc0_RW / total_R1, mask=row_mask_RW)
                tl.store(part_RW + 1, acc1_RW / total_R1, mask=row_mask_RW)
                tl.store(part_RW + 2, acc2_RW / total_R1, mask=row_mask_RW)
                tl.store(part_RW + 3, acc3_RW / total_R1, mask=row_mask_RW)
                lse_R = tl.where(is_empty_R, float("-inf"), best_R + tl.log2(tl.where(is_empty_R, 1.0, total_R)))
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
