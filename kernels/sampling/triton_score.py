"""Scores of a chosen token and of the best ones, in Triton. Knows one row's raw logits, and the best of its groups.

The k best tokens are in the k groups of the best best; those better than a token in groups whose best is.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_groups import list_groups, listed_tokens
from jaxllm.kernels.sampling.triton_logits import NO_TOKEN, NOWHERE, from_key, sort_key


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
    TILE_GROUPS: tl.constexpr,
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
    keys = raw_key + b * NUM_GROUPS
    mine = listed + b * NUM_GROUPS
    count = list_groups(keys, sort_key(own_logit) + 1, mine, NUM_GROUPS, TILE_GROUPS)
    num_better_X = tl.zeros([TILE], tl.int32)
    for start in range(0, count, TILE // G):
        token_X, is_token_X = listed_tokens(mine, start, count, V, G, TILE)
        score_X = tl.load(row + token_X, mask=is_token_X, other=float("-inf")) - highest - log_total
        num_better_X += (is_token_X & (score_X > own)).to(tl.int32)
    tl.store(rank_out + b, tl.sum(num_better_X, 0) + 1)

    if NUM_BEST > 0:
        group_N = tl.arange(0, GROUPS_PADDED)
        key_N = tl.load(keys + group_N, mask=group_N < NUM_GROUPS, other=NOWHERE)
        # Logits that differ may have equal scores: the order is that of the scores.
        key_N = tl.where(key_N > NOWHERE, sort_key(from_key(key_N) - highest - log_total), NOWHERE)
        j_J = tl.arange(0, BEST_PADDED)
        group_J = tl.full([BEST_PADDED], -1, tl.int32)
        for j in range(NUM_BEST):
            top = tl.max(key_N, 0)
            group = tl.min(tl.where(key_N == top, group_N, NO_TOKEN), 0)
            group_J = tl.where((j_J == j) & (top > NOWHERE), group, group_J)
            key_N = tl.where(group_N == group, NOWHERE, key_N)
        token_JG = group_J[:, None] * G + tl.arange(0, G)[None, :]
        is_token_JG = (group_J[:, None] >= 0) & (token_JG < V)
        score_JG = tl.load(row + token_JG, mask=is_token_JG, other=float("-inf")) - highest - log_total
        key_JG = tl.where(is_token_JG, sort_key(score_JG), NOWHERE)
        for j in range(NUM_BEST):
            top = tl.max(tl.max(key_JG, 1), 0)
            best = tl.min(tl.min(tl.where(key_JG == top, token_JG, NO_TOKEN), 1), 0)
            tl.store(best_out + b * NUM_BEST + j, from_key(top))
            tl.store(best_token_out + b * NUM_BEST + j, best)
            key_JG = tl.where(token_JG == best, NOWHERE, key_JG)
