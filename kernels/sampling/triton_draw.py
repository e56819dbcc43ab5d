"""The draw, in Triton: of rows without filters the best of a few chunks, of others thresholds, then noise for what is
kept.

A program handles one row. It lists the groups that can hold a kept token. Mostly they fit into one tile, which is read
once and searched in registers. Where a nucleus holds thousands of tokens, each step of a search reads the list anew.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_groups import list_groups, listed_tokens, mark_groups
from jaxllm.kernels.sampling.triton_logits import (
    DRAWS_FROM_ALL,
    DRAWS_FROM_NUCLEUS,
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
    mode,
    top_k,
    top_p,
    least,
    chunk_bound,
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
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SEARCH_TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PENALTIES: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    """Handles row program_id."""
    b = tl.program_id(0)
    c_S = tl.arange(0, CHUNKS_PADDED)
    is_chunk_S = c_S < NUM_CHUNKS
    heat = tl.load(temperature + b)
    best_token = tl.full([], NO_TOKEN, tl.int32)
    best_score = tl.full([], float("-inf"), tl.float32)
    if tl.load(mode + b) == DRAWS_FROM_ALL:
        # From the chunk of the best prospects on, as long as there is one that may hold a better token.
        bound_S = tl.load(chunk_bound + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=float("-inf"))
        bound = tl.max(bound_S, 0)
        while (bound > float("-inf")) & ((bound > best_score) | ((bound == best_score) & (heat != 0.0))):
            c = tl.min(tl.where(bound_S == bound, c_S, NO_TOKEN), 0)
            token_X = c * CHUNK + tl.arange(0, CHUNK)
            is_token_X = token_X < V
            score_X = apply_rules(
                load_logits(logits, b, token_X, is_token_X, V),
                mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                b, token_X, is_token_X, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
            )  # fmt: skip
            if heat != 0.0:
                score_X = perturb(score_X, heat, seed, position, b, token_X)
            best_score, best_token = better_of(score_X, token_X, is_token_X, best_score, best_token)
            bound_S = tl.where(c_S == c, float("-inf"), bound_S)
            bound = tl.max(bound_S, 0)
    elif HAS_FILTERS:
        k = tl.load(top_k + b)
        p = tl.load(top_p + b)
        least_scaled = tl.load(least + b)
        has_min_p = least_scaled > float("-inf")
        is_nucleus_only = tl.load(mode + b) == DRAWS_FROM_NUCLEUS
        mine = listed + b * NUM_GROUPS
        group_N = tl.arange(0, GROUPS_PADDED)
        key_N = tl.load(group_key + b * NUM_GROUPS + group_N, mask=group_N < NUM_GROUPS, other=NOWHERE)
        top = tl.max(key_N, 0)
        highest = from_key(top)
        if has_min_p:
            key_N = tl.where(scale(from_key(key_N), highest, heat) >= least_scaled, key_N, NOWHERE)
        num_groups = tl.sum((key_N > NOWHERE).to(tl.int32), 0)
        total = tl.full([], 0.0, tl.float32)
        if is_nucleus_only:
            max_S = tl.load(chunk_max + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=float("-inf"))
            total_S = tl.load(chunk_total + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=0.0)
            is_some_S = max_S > float("-inf")
            share_S = tl.exp(scale(tl.where(is_some_S, max_S, highest), highest, heat))
            total = tl.sum(tl.where(is_some_S, total_S * share_S, 0.0), 0)

        # The groups to look at. k groups whose best reach a mark hold k tokens that do. How many a nucleus takes is
        # tried out: all of it is listed if what reaches the list's mark has its mass.
        wanted = tl.where(k > 0, tl.minimum(k, num_groups), tl.where(is_nucleus_only, TILE // G // 2, num_groups))
        mark = mark_groups(key_N, wanted, tl.maximum(TILE // G, wanted + wanted // 4))
        count = list_groups(key_N, group_N, mark, mine)
        is_drawn = tl.full([], 0, tl.int32)
        if count <= TILE // G:
            token_X, is_token_X = listed_tokens(mine, 0, count, V, G, TILE)
            x_X = apply_rules(
                load_logits(logits, b, token_X, is_token_X, V),
                mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                b, token_X, is_token_X, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
            )  # fmt: skip
            scaled_X = scale(x_X, highest, heat)
            key_X = sort_key(x_X)
            key_X = tl.where(is_token_X & (key_X >= mark) & (scaled_X >= least_scaled), key_X, NOWHERE)
            if k > 0:
                one_X = (key_X > NOWHERE).to(tl.float32)
                enough = tl.minimum(tl.sum(one_X, 0), k.to(tl.float32))
                key_X = tl.where(key_X >= search_mark(key_X, one_X, enough, mark, top), key_X, NOWHERE)
            is_drawn = tl.full([], 1, tl.int32)
            if p < 1.0:
                mass_X = tl.where(key_X > NOWHERE, tl.exp(scaled_X), 0.0)
                held = tl.sum(mass_X, 0)
                enough = p * tl.where(is_nucleus_only, total, held)
                is_drawn = ((not is_nucleus_only) | (count >= num_groups) | (held >= enough)).to(tl.int32)
                if is_drawn == 1:
                    # The best stays, also where a tiny top_p is 0 in float32.
                    key_X = tl.where(key_X >= search_mark(key_X, mass_X, enough, mark, top), key_X, NOWHERE)
            if is_drawn == 1:
                score_X = perturb(x_X, heat, seed, position, b, token_X)
                best_score, best_token = better_of(score_X, token_X, key_X > NOWHERE, best_score, best_token)

        if is_drawn == 0:
            is_listed = ((not is_nucleus_only) | (count >= num_groups)).to(tl.int32)
            while is_listed == 0:
                wanted = tl.minimum(wanted * 32, num_groups)
                mark = mark_groups(key_N, wanted, wanted + wanted // 4)
                count = list_groups(key_N, group_N, mark, mine)
                is_listed = (count >= num_groups).to(tl.int32)
                if is_listed == 0:
                    held_J = weigh(
                        logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency,
                        presence, b, mine, count, mark, 0, highest, heat, least_scaled, False,
                        V, W, E, E_PADDED, G, SEARCH_TILE, HAS_MASK, HAS_PENALTIES,
                    )  # fmt: skip
                    is_listed = (tl.max(held_J, 0) >= p * total).to(tl.int32)

            # The thresholds themselves, first that of top_k.
            turn = tl.where(k > 0, 0, 1)
            while turn < 2:
                by_count = turn == 0
                enough = p * total
                if by_count | (not is_nucleus_only):
                    held_J = weigh(
                        logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency,
                        presence, b, mine, count, mark, 0, highest, heat, least_scaled, by_count,
                        V, W, E, E_PADDED, G, SEARCH_TILE, HAS_MASK, HAS_PENALTIES,
                    )  # fmt: skip
                    held = tl.max(held_J, 0)
                    enough = tl.where(by_count, tl.minimum(held, k.to(tl.float32)), p * held)
                low = mark.to(tl.int64)
                high = top.to(tl.int64) + 1
                if (not by_count) & (p >= 1.0):
                    high = low + 1
                while high - low > 1:
                    step = (high - low + _MARKS - 1) // _MARKS
                    held_J = weigh(
                        logits, mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency,
                        presence, b, mine, count, low, step, highest, heat, least_scaled, by_count,
                        V, W, E, E_PADDED, G, SEARCH_TILE, HAS_MASK, HAS_PENALTIES,
                    )  # fmt: skip
                    reached = tl.maximum(tl.sum((held_J >= enough).to(tl.int32), 0), 1)
                    high = tl.minimum(high, low + step * reached)
                    low = low + step * (reached - 1)
                mark = tl.minimum(low.to(tl.int32), top)  # as above
                turn += 1

            for start in range(0, count, TILE // G):
                token_X, is_token_X = listed_tokens(mine, start, count, V, G, TILE)
                x_X = apply_rules(
                    load_logits(logits, b, token_X, is_token_X, V),
                    mask, edit_request, edit_token, edit_value, counts, row, repetition, frequency, presence,
                    b, token_X, is_token_X, V, W, E, E_PADDED, HAS_MASK, HAS_PENALTIES,
                )  # fmt: skip
                kept_X = is_token_X & (sort_key(x_X) >= mark) & (scale(x_X, highest, heat) >= least_scaled)
                score_X = perturb(x_X, heat, seed, position, b, token_X)
                best_score, best_token = better_of(score_X, token_X, kept_X, best_score, best_token)
    tl.store(token_out + b, tl.where(best_token == NO_TOKEN, 0, best_token))


@triton.jit
def better_of(score_X, token_X, is_some_X, best_score, best_token):
    """Gives the best of some tokens and one more, with its score; of equals the lowest."""
    score_X = tl.where(is_some_X, score_X, float("-inf"))
    score = tl.max(score_X, 0)
    token = tl.min(tl.where(is_some_X & (score_X == score), token_X, NO_TOKEN), 0)
    is_better = (score > best_score) | ((score == best_score) & (token < best_token))
    return tl.where(is_better, score, best_score), tl.where(is_better, token, best_token)


@triton.jit
def search_mark(key_X, weight_X, enough, low, high):
    """The largest mark from `low` to `high` such that what reaches it weighs enough; `low` if there is none."""
    low = low.to(tl.int64)
    high = high.to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if tl.sum(tl.where(key_X >= middle.to(tl.int32), weight_X, 0.0), 0) >= enough:
            low = middle
        else:
            high = middle
    return low.to(tl.int32)


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
    held_XJ = tl.zeros([TILE, _MARKS], tl.float32)  # summed up at the end: a sum over threads takes long
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
        held_XJ += tl.where(reaches_XJ, weight_X[:, None], 0.0)
        token_X, is_token_X, loaded_X = next_X, is_next_X, next_loaded_X
    return tl.sum(held_XJ, 0)
