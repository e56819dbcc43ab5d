"""Lists of groups whose best token is above a threshold, in Triton, and the thresholds. Knows keys, not what they are.

Reading only such groups, a program sees every token above the threshold: few of a row's 8,016 groups of 16, mostly.
"""

import triton
import triton.language as tl

from jaxllm.kernels.sampling.triton_logits import NOWHERE


@triton.jit
def mark_groups(key_N, wanted, limit):
    """Gives a mark that `wanted` keys reach (all that are somewhere, where they are fewer), and hardly more than
    `limit`; a lowest mark if that cannot be.
    """
    low = tl.full([], NOWHERE + 1, tl.int64)
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
    return low.to(tl.int32)


@triton.jit
def list_groups(group_key, mark, listed, NUM_GROUPS: tl.constexpr, TILE_GROUPS: tl.constexpr):
    """Writes down the groups of a row whose keys reach the mark, for this program to read; gives their number."""
    tl.debug_barrier()  # the last list has been read
    count = tl.full([], 0, tl.int32)
    for start in range(0, NUM_GROUPS, TILE_GROUPS):
        group_X = start + tl.arange(0, TILE_GROUPS)
        key_X = tl.load(group_key + group_X, mask=group_X < NUM_GROUPS, other=NOWHERE)
        reaches_X = ((key_X >= mark) & (group_X < NUM_GROUPS)).to(tl.int32)
        place_X = count + tl.cumsum(reaches_X, 0) - 1
        tl.store(listed + place_X, group_X, mask=reaches_X == 1)
        count += tl.sum(reaches_X, 0)
    tl.debug_barrier()
    return count


@triton.jit
def listed_tokens(listed, start, count, V: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr):
    """Gives the tokens of the groups start to start + TILE / G of a list, and which of them there are."""
    i_X = tl.arange(0, TILE)
    place_X = start + i_X // G
    is_group_X = place_X < count
    token_X = tl.load(listed + place_X, mask=is_group_X, other=0) * G + i_X % G
    return token_X, is_group_X & (token_X < V)
