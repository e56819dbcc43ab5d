"""The draw of filtered rows, in Triton: thresholds of min_p, top_k and top_p, then Gumbel noise for what is kept.

A program handles one row. It lists the groups that can hold a kept token, and searches the thresholds there, sixteen
marks at a time. Only where the nucleus holds thousands of tokens the list is the whole row.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_groups import list_groups, listed_tokens, mark_groups
from jaxllm.kernels.sampling.triton_logits import (
    NO_TOKEN,
    NOWHERE,
    apply_rules,
    from_key,
    load_logits,
    perturb,
    scale,
    sort_key,
)

_MARKS = tl.constexpr(16)


@triton.jit
def draw_tokens(
    logits,
    mask,
    edit_request,
    edit_token,
    edit_value,
    counts,
    row,
    repetition,
    frequency,
    presence,
    temperature,
    seed,
    position,
    draws,
    top_k,
    top_p,
    least,
    chunk_score,
    chunk_token,
    chunk_max,
    chunk_total,
    group_key,
    token_out,
    listed,
    V: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    G: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
):
    """Handles row program_id. Rows that have drawn already take the best of their chunks."""
    b = tl.program_id(0)
    c_S = tl.arange(0, CHUNKS_PADDED)
    is_chunk_S = c_S < NUM_CHUNKS
    best_token = tl.full([], NO_TOKEN, tl.int32)
    best_score = tl.full([], float("-inf"), tl.float32)
    if tl.load(draws + b) == 1:
        score_S = tl.load(chunk_score + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=float("-inf"))
        token_S = tl.load(chunk_token + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=NO_TOKEN)
        best_score = tl.max(score_S, 0)
        best_token = tl.min(tl.where(score_S == best_score, token_S, NO_TOKEN), 0)
    else:
        heat = tl.load(temperature + b)
        k = tl.load(top_k + b)
        p = tl.load(top_p + b)
        least_scaled = tl.load(least + b)
        has_min_p = least_scaled > float("-inf")
        mine = listed + b * NUM_GROUPS
        group_N = tl.arange(0, GROUPS_PADDED)
        keys = group_key + b * NUM_GROUPS
        key_N = tl.load(keys + group_N, mask=group_N < NUM_GROUPS, other=NOWHERE)
        top = tl.max(key_N, 0)
        highest = from_key(top)
        if has_min_p:
            key_N = tl.where(scale(from_key(key_N), highest, heat) >= least_scaled, key_N, NOWHERE)
        num_groups = tl.sum((key_N > NOWHERE).to(tl.int32), 0)
        worst = tl.min(tl.where(key_N > NOWHERE, key_N, NO_TOKEN), 0)
        max_S = tl.load(chunk_max + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=float("-inf"))
        total_S = tl.load(chunk_total + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=0.0)
        is_some_S = max_S > float("-inf")
        share_S = tl.exp(scale(tl.where(is_some_S, max_S, highest), highest, heat))
        total = tl.sum(tl.where(is_some_S, total_S * share_S, 0.0), 0)

        # The groups to look at. k groups whose best reach a mark hold k tokens that do. How many a nucleus takes is
        # tried out: all of it is listed if what reaches the list's mark has its mass.
        is_nucleus_only = (k == 0) & (not has_min_p)
        wanted = tl.where(k > 0, k, tl.where(is_nucleus_only, TILE // G, num_groups))
        mark = tl.full([], NOWHERE + 1, tl.int32)
        count = tl.full([], 0, tl.int32)
        is_listed = tl.full([], 0, tl.int32)
        while is_listed == 0:
            wanted = tl.minimum(wanted, num_groups)
            mark = mark_groups(key_N, wanted, wanted + wanted // 4)
            count = list_groups(keys, tl.maximum(mark, worst), mine, NUM_GROUPS, TILE_GROUPS)
            is_listed = ((k > 0) | has_min_p | (count >= num_groups)).to(tl.int32)
            if is_listed == 0:
                held_J = weigh(
                    logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                    b, mine, count, mark, 0, highest, heat, least_scaled, False,
                    V, W, E, E_PADDED, G, TILE, HAS_MASK, HAS_PENALTIES,
                )  # fmt: skip
                is_listed = (tl.max(held_J, 0) >= p * total).to(tl.int32)
                wanted = wanted * 16

        # The thresholds themselves, first that of top_k.
        turn = tl.where(k > 0, 0, 1)
        while turn < 2:
            by_count = turn == 0
            held_J = weigh(
                logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                b, mine, count, mark, 0, highest, heat, least_scaled, by_count,
                V, W, E, E_PADDED, G, TILE, HAS_MASK, HAS_PENALTIES,
            )  # fmt: skip
            held = tl.max(held_J, 0)
            enough = tl.minimum(held, k.to(tl.float32))
            if not by_count:
                enough = p * tl.where(is_nucleus_only, total, held)
            low = mark.to(tl.int64)
            high = top.to(tl.int64) + 1
            if (not by_count) & (p >= 1.0):
                high = low + 1
            while high - low > 1:
                step = (high - low + _MARKS - 1) // _MARKS
                held_J = weigh(
                    logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                    b, mine, count, low, step, highest, heat, least_scaled, by_count,
                    V, W, E, E_PADDED, G, TILE, HAS_MASK, HAS_PENALTIES,
                )  # fmt: skip
                reached = tl.maximum(tl.sum((held_J >= enough).to(tl.int32), 0), 1)
                high = tl.minimum(high, low + step * reached)
                low = low + step * (reached - 1)
            mark = tl.minimum(low.to(tl.int32), top)  # the best stays, also where a tiny top_p is 0 in float32
            turn += 1

        for start in range(0, count, TILE // G):
            token_X, is_token_X = listed_tokens(mine, start, count, V, G, TILE)
            x_X = apply_rules(
                load_logits(logits, b, token_X, is_token_X, V),
                mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                b, token_X, is_token_X, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
            )  # fmt: skip
            kept_X = is_token_X & (sort_key(x_X) >= mark) & (scale(x_X, highest, heat) >= least_scaled)
            score_X = tl.where(kept_X, perturb(x_X, heat, seed, position, b, token_X), float("-inf"))
            score = tl.max(score_X, 0)
            token = tl.min(tl.where(kept_X & (score_X == score), token_X, NO_TOKEN), 0)
            is_better = (score > best_score) | ((score == best_score) & (token < best_token))
            best_score = tl.where(is_better, score, best_score)
            best_token = tl.where(is_better, token, best_token)
    tl.store(token_out + b, tl.where(best_token == NO_TOKEN, 0, best_token))


@triton.jit
def weigh(
    logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
    b, listed, count, low, step, highest, heat, least_scaled, by_count,
    V: tl.constexpr, W: tl.constexpr, E: tl.constexpr, E_PADDED: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_PENALTIES: tl.constexpr,
):  # fmt: skip
    """Gives number or mass of the listed tokens that reach the marks low, low + step, ... and are left by min_p."""
    j_J = tl.arange(0, _MARKS)
    # The marks past the largest key say what that one does, which nobody asks for.
    mark_J = tl.minimum(low + j_J.to(tl.int64) * step, NO_TOKEN).to(tl.int32)
    held_J = tl.zeros([_MARKS], tl.float32)
    token_X, is_token_X = listed_tokens(listed, 0, count, V, G, TILE)
    loaded_X = load_logits(logits, b, token_X, is_token_X, V)
    for start in range(0, count, TILE // G):
        # The next tile is on its way while this one is weighed.
        next_X, is_next_X = listed_tokens(listed, start + TILE // G, count, V, G, TILE)
        next_loaded_X = load_logits(logits, b, next_X, is_next_X, V)
        x_X = apply_rules(
            loaded_X, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
            b, token_X, is_token_X, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
        )  # fmt: skip
        scaled_X = scale(x_X, highest, heat)
        weight_X = tl.where(by_count, 1.0, tl.exp(scaled_X))
        weight_X = tl.where(is_token_X & (scaled_X >= least_scaled), weight_X, 0.0)
        reaches_XJ = sort_key(x_X)[:, None] >= mark_J[None, :]
        held_J += tl.sum(tl.where(reaches_XJ, weight_X[:, None], 0.0), 0)
        token_X, is_token_X, loaded_X = next_X, is_next_X, next_loaded_X
    return held_J
