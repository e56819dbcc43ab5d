"""The softmax of the Triton kernels: its beginning, and the loop over the paged keys of one request and KV head."""

import triton
import triton.language as tl

from jaxllm.kernels.e4m3.triton import widened


@triton.jit
def begin_softmax(sinks, head_R, has_sink, HAS_SINKS: tl.constexpr):
    """Gives the best score so far, times log2(e), and the total of these heads' rows: of nothing, or of their sinks."""
    best_R = tl.full(head_R.shape, float("-inf"), tl.float32)
    total_R = tl.zeros(head_R.shape, tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - one is known when compiling, the other is not
        if has_sink:
            best_R = tl.load(sinks + head_R) * 1.4426950408889634
            total_R = tl.where(best_R == float("-inf"), 0.0, 1.0)
    return best_R, total_R


@triton.jit
def attend_keys(
    q_RH,
    base,
    table,
    begin,
    end,
    position_R,
    oldest_R,
    best_R,
    total_R,
    acc_RH,
    K: tl.constexpr,
    H: tl.constexpr,
    H_PADDED: tl.constexpr,
    C: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Takes the rows over the keys begin:end (begin is a multiple of TILE_KEYS); gives the new best, total and sum.

    `best` is the highest score so far, times log2(e). Bounded: end need not be a multiple of TILE_KEYS. Causal: a row
    sees the keys from oldest to position only; where it may see none of a tile's, the softmax needs another anchor than
    minus infinity.
    """
    x_X = tl.arange(0, TILE_KEYS)
    d_H = tl.arange(0, H_PADDED)
    for start in range(begin, end, TILE_KEYS):
        key_X = start + x_X
        is_key_X = key_X < end
        if C % TILE_KEYS == 0:  # the tile lies in one block
            block = tl.load(table + start // C).to(tl.int64)
            tile = base + block * (2 * K * C * H) + (start % C) * H
            slot_X = x_X * H
        else:
            tile = base
            if IS_BOUNDED:
                block_X = tl.load(table + key_X // C, mask=is_key_X, other=0).to(tl.int64)
            else:
                block_X = tl.load(table + key_X // C).to(tl.int64)
            slot_X = block_X * (2 * K * C * H) + (key_X % C) * H
        k_ptr_HX = tile + slot_X[None, :] + d_H[:, None]
        k_HX = load_tile(k_ptr_HX, is_key_X[None, :], d_H[:, None] < H, IS_BOUNDED, H_PADDED > H)
        score_RX = tl.dot(q_RH, widened(k_HX, q_RH.dtype), input_precision=PRECISION)
        if SOFTCAP is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), in base 2; it is right for infinite exponentials too.
            turned_RX = tl.exp2(score_RX * (SCALE * 2.8853900817779268 / SOFTCAP))
            score_RX = (1.0 - 2.0 / (turned_RX + 1.0)) * SOFTCAP
        TO_LOG2: tl.constexpr = (SCALE if SOFTCAP is None else 1.0) * 1.4426950408889634
        if IS_CAUSAL:
            seen_RX = (key_X[None, :] <= position_R[:, None]) & is_key_X[None, :]
            if HAS_WINDOW:
                seen_RX = seen_RX & (key_X[None, :] >= oldest_R[:, None])
            score_RX = tl.where(seen_RX, score_RX, float("-inf"))
        elif IS_BOUNDED:
            score_RX = tl.where(is_key_X[None, :], score_RX, float("-inf"))
        new_best_R = tl.maximum(best_R, tl.max(score_RX, 1) * TO_LOG2)
        anchor_R = new_best_R
        if MAY_SEE_NOTHING:
            anchor_R = tl.where(new_best_R == float("-inf"), 0.0, new_best_R)
        weight_RX = tl.exp2(score_RX * TO_LOG2 - anchor_R[:, None])
        shrink_R = tl.exp2(best_R - anchor_R)
        total_R = total_R * shrink_R + tl.sum(weight_RX, 1)
        acc_RH = acc_RH * shrink_R[:, None]
        v_ptr_XH = tile + (K * C * H) + slot_X[:, None] + d_H[None, :]
        v_XH = load_tile(v_ptr_XH, is_key_X[:, None], d_H[None, :] < H, IS_BOUNDED, H_PADDED > H)
        acc_RH = tl.dot(weight_RX.to(q_RH.dtype), widened(v_XH, q_RH.dtype), acc_RH, input_precision=PRECISION)
        best_R = new_best_R
    return best_R, total_R, acc_RH


@triton.jit
def load_tile(pointer, is_key, is_feature, IS_BOUNDED: tl.constexpr, IS_PADDED: tl.constexpr):
    """Loads keys or values, zero where there is none. A mask costs instructions: only those that are needed."""
    if IS_BOUNDED and IS_PADDED:
        tile = tl.load(pointer, mask=is_key & is_feature, other=0.0)
    elif IS_BOUNDED:
        tile = tl.load(pointer, mask=is_key, other=0.0)
    elif IS_PADDED:
        tile = tl.load(pointer, mask=is_feature, other=0.0)
    else:
        tile = tl.load(pointer)
    return tile
