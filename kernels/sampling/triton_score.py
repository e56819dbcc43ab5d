"""Scores of a chosen token and of the best ones, in Triton. Knows one row's raw logits, and the best of its groups.

The k best tokens are in the k groups of the best best; those better than a token in groups whose best is. Mostly one
tile of groups holds them all.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_groups import list_groups, listed_tokens, mark_groups
from jaxllm.kernels.sampling.triton_logits import NO_TOKEN, NOWHERE, from_key, place, placed_key, placed_token, sort_key


@triton.jit
def score_tokens(
    raw,
    token,
    raw_max,
    raw_total,
    raw_key,
    chosen_out,
    rank_out,
    best_out,
    best_token_out,
    highest_out,
    log_total_out,
    listed,
    V: tl.constexpr,
    G: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    NUM_BEST: tl.constexpr,
    BEST_PADDED: tl.constexpr,
    AS_LOGPROBS: tl.constexpr,
):
    """Handles row program_id."""
    b = tl.program_id(0)
    highest = tl.full([], 0.0, tl.float32)
    log_total = tl.full([], 0.0, tl.float32)
    if AS_LOGPROBS:
        c_S = tl.arange(0, CHUNKS_PADDED)
        is_chunk_S = c_S < NUM_CHUNKS
        max_S = tl.load(raw_max + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=float("-inf"))
        total_S = tl.load(raw_total + b * NUM_CHUNKS + c_S, mask=is_chunk_S, other=0.0)
        highest = tl.max(max_S, 0)
        log_total = tl.log(tl.sum(tl.where(max_S > float("-inf"), total_S * tl.exp(max_S - highest), 0.0), 0))
    tl.store(highest_out + b, highest)
    tl.store(log_total_out + b, log_total)

    row = raw + b.to(tl.int64) * V
    own_logit = tl.load(row + tl.load(token + b))
    own = own_logit - highest - log_total
    tl.store(chosen_out + b, own)
    mine = listed + b * NUM_GROUPS
    group_N = tl.arange(0, GROUPS_PADDED)
    key_N = tl.load(raw_key + b * NUM_GROUPS + group_N, mask=group_N < NUM_GROUPS, other=NOWHERE)
    # Logits that differ may have equal scores: the order is that of the scores.
    key_N = tl.where(key_N > NOWHERE, sort_key(from_key(key_N) - highest - log_total), NOWHERE)
    own_key = sort_key(own)
    wanted = NUM_BEST if NUM_BEST > 0 else TILE // G // 2
    mark = mark_groups(key_N, wanted, TILE // G)
    count = list_groups(key_N, group_N, mark, mine)
    is_ranked = tl.full([], 0, tl.int32)
    if count <= TILE // G:
        token_X, is_token_X = listed_tokens(mine, 0, count, V, G, TILE)
        score_X = tl.load(row + token_X, mask=is_token_X, other=float("-inf")) - highest - log_total
        if own_key >= mark:
            tl.store(rank_out + b, tl.sum((is_token_X & (score_X > own)).to(tl.int32), 0) + 1)
            is_ranked = tl.full([], 1, tl.int32)
        store_best(tl.where(is_token_X, sort_key(score_X), NOWHERE), token_X, b, best_out, best_token_out, NUM_BEST)
    elif NUM_BEST > 0:
        # Too many equals: the groups themselves, one by one.
        left_N = key_N
        j_J = tl.arange(0, BEST_PADDED)
        group_J = tl.full([BEST_PADDED], -1, tl.int32)
        for j in range(NUM_BEST):
            top = tl.max(left_N, 0)
            group = tl.min(tl.where(left_N == top, group_N, NO_TOKEN), 0)
            group_J = tl.where((j_J == j) & (top > NOWHERE), group, group_J)
            left_N = tl.where(group_N == group, NOWHERE, left_N)
        token_JG = group_J[:, None] * G + tl.arange(0, G)[None, :]
        is_token_JG = (group_J[:, None] >= 0) & (token_JG < V)
        score_JG = tl.load(row + token_JG, mask=is_token_JG, other=float("-inf")) - highest - log_total
        key_X = tl.reshape(tl.where(is_token_JG, sort_key(score_JG), NOWHERE), [BEST_PADDED * G])
        store_best(key_X, tl.reshape(token_JG, [BEST_PADDED * G]), b, best_out, best_token_out, NUM_BEST)
    if is_ranked == 0:
        count = list_groups(key_N, group_N, own_key + 1, mine)
        num_better_X = tl.zeros([TILE], tl.int32)
        for start in range(0, count, TILE // G):
            token_X, is_token_X = listed_tokens(mine, start, count, V, G, TILE)
            score_X = tl.load(row + token_X, mask=is_token_X, other=float("-inf")) - highest - log_total
            num_better_X += (is_token_X & (score_X > own)).to(tl.int32)
        tl.store(rank_out + b, tl.sum(num_better_X, 0) + 1)


@triton.jit
def store_best(key_X, token_X, b, best_out, best_token_out, NUM_BEST: tl.constexpr):
    """Writes down the scores of the largest keys, and their tokens; of equals the lowest first."""
    place_X = place(key_X, token_X)
    for j in range(NUM_BEST):
        first = tl.max(place_X, 0)
        tl.store(best_out + b * NUM_BEST + j, from_key(placed_key(first)))
        tl.store(best_token_out + b * NUM_BEST + j, placed_token(first))
        place_X = tl.where(place_X == first, place(NOWHERE, NO_TOKEN), place_X)
