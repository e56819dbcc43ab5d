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
    worst = tl.min(tl.where(key_N > NOWHERE, key_N, NO_TOKEN), 0).to(tl.int64)
    low = worst
    high = tl.max(key_N, 0).to(tl.int64) + 1
    count = tl.sum((key_N > NOWHERE).to(tl.int32), 0)
    while (count > limit) & (high - low > 1):
        middle = (low + high) >> 1
        reach = tl.sum((key_N >= middle.to(tl.int32)).to(tl.int32), 0)
        if reach >= wanted:
            low = middle
            count = reach
        else:
            high = middle
    return tl.where(low == worst, NOWHERE + 1, low).to(tl.int32)  # the groups' other tokens are below their best


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
