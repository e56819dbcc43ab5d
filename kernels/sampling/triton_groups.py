"""Lists of groups whose best token is above a threshold, in Triton, and the thresholds. Knows keys, not what they are.

Reading only such groups, a program sees every token above the threshold: few of a row's 4,008 groups of 32, mostly.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_logits import NO_TOKEN, NOWHERE


@triton.jit
def mark_groups(key_N, wanted, limit):
    """Gives a mark that `wanted` keys reach (all that are somewhere, where they are fewer), and hardly more than
    `limit`; if that cannot be, or all keys are wanted, a mark that every token reaches.
    """
    worst = tl.min(tl.where(key_N > NOWHERE, key_N, NO_TOKEN), 0)
    mark = search_mark(key_N, wanted, limit, worst, tl.max(key_N, 0))
    return tl.where(mark == worst, NOWHERE + 1, mark)  # the groups' other tokens are below their best


@triton.jit
def search_mark(key_N, wanted, limit, low, high):
    """Gives a mark from `low` to `high` that `wanted` keys reach, and no more than `limit` unless equals are in the
    way; `low` where fewer than wanted are above it.

    A sum over threads takes long, so four marks share each: a count of theirs has 16 bits.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64) + 1
    count = tl.sum((key_N >= low.to(tl.int32)).to(tl.int32), 0)
    while (count > limit) & (high - low > 1):
        step = (high - low + 4) // 5
        counts_N = (key_N >= tl.minimum(low + step, high - 1).to(tl.int32)).to(tl.int64)
        for j in tl.static_range(1, 4):
            reaches_N = key_N >= tl.minimum(low + step * (j + 1), high - 1).to(tl.int32)
            counts_N += reaches_N.to(tl.int64) << (16 * j)
        counts = tl.sum(counts_N, 0)
        reached = tl.full([], 0, tl.int64)
        for j in tl.static_range(4):
            reach = ((counts >> (16 * j)) & 0xFFFF).to(tl.int32)
            reached += (reach >= wanted).to(tl.int64)
            count = tl.where(reach >= wanted, reach, count)
        last = high - 1
        high = tl.minimum(high, low + step * (reached + 1))
        low = tl.minimum(low + step * reached, last)
    return low.to(tl.int32)


@triton.jit
def list_groups(key_N, group_N, mark, listed):
    """Writes down the groups whose keys reach the mark, for this program to read; gives their number."""
    tl.debug_barrier()  # the last list has been read
    reaches_N = ((key_N >= mark) & (key_N > NOWHERE)).to(tl.int32)
    place_N = tl.cumsum(reaches_N, 0) - 1
    tl.store(listed + place_N, group_N, mask=reaches_N == 1)
    tl.debug_barrier()
    return tl.sum(reaches_N, 0)


@triton.jit
def listed_tokens(listed, start, count, V: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr):
    """Gives the tokens of the groups start to start + TILE / G of a list, and which of them there are."""
    i_X = tl.arange(0, TILE)
    place_X = start + i_X // G
    is_group_X = place_X < count
    token_X = tl.load(listed + place_X, mask=is_group_X, other=0) * G + i_X % G
    return token_X, is_group_X & (token_X < V)


@triton.jit
def list_tokens(token_X, is_some_X, listed, start, LIMIT: tl.constexpr):
    """Writes down those tokens that are some, from the place `start` on, as far as LIMIT; gives their number."""
    is_some_X = is_some_X.to(tl.int32)
    place_X = start + tl.cumsum(is_some_X, 0) - 1
    tl.store(listed + place_X, token_X, mask=(is_some_X == 1) & (place_X < LIMIT))
    return tl.sum(is_some_X, 0)
