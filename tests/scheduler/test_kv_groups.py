from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups

GEMMA_3_270M = (512, 512, 512, 512, 512, None)


def test_growing_extends_the_tables_of_all_groups_alike():
    pool, groups = BlockPool(num_blocks=9, block_size=4), KVGroups((None, 512))
    tables = groups.empty_tables()
    assert groups.grow(tables, 0, 5, pool)
    assert tables == [[1, 2], [3, 4]]
    assert groups.grow(tables, 5, 8, pool)
    assert tables == [[1, 2], [3, 4]]
    assert groups.grow(tables, 8, 9, pool)
    assert tables == [[1, 2, 5], [3, 4, 6]]
    assert pool.num_free == 2


def test_growing_lends_in_no_group_when_it_cannot_lend_in_all():
    pool, groups = BlockPool(num_blocks=6, block_size=4), KVGroups((None, None))
    tables = groups.empty_tables()
    assert groups.grow(tables, 0, 8, pool)
    assert not groups.grow(tables, 8, 9, pool)
    assert tables == [[1, 2], [3, 4]]
    assert pool.num_free == 1


def test_a_group_with_a_window_gives_back_what_is_wholly_behind_it():
    pool, groups = BlockPool(num_blocks=20, block_size=2), KVGroups((None, 4))
    tables = groups.empty_tables()
    assert groups.grow(tables, 0, 6, pool)
    assert tables == [[1, 2, 3], [4, 5, 6]]
    assert groups.grow(tables, 6, 8, pool)  # token 6 sees 3 and on, which block 1 holds
    assert tables == [[1, 2, 3, 7], [0, 5, 6, 8]]
    assert groups.grow(tables, 12, 13, pool)
    assert [len(table) for table in tables] == [7, 7]
    assert all(tables[0])
    assert [block > 0 for block in tables[1]] == [False] * 4 + [True] * 3
    groups.release(tables, pool)
    assert pool.num_lent == 0
    pool.check()


def test_what_a_window_gives_back_serves_the_same_growth():
    pool, groups = BlockPool(num_blocks=4, block_size=1), KVGroups((3,))
    tables = groups.empty_tables()
    for position in range(10):
        assert groups.grow(tables, position, position + 1, pool)
    assert tables[0][:7] == [0] * 7
    assert sorted(tables[0][7:]) == [1, 2, 3]


def test_released_tables_are_empty_and_the_ends_of_all_groups_are_lent_first():
    pool, groups = BlockPool(num_blocks=9, block_size=4), KVGroups((None, None))
    tables = groups.empty_tables()
    groups.grow(tables, 0, 16, pool)
    groups.release(tables, pool)
    assert tables == [[], []]
    assert pool.lend(8) == [4, 8, 3, 7, 2, 6, 1, 5]


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 3), (4, 3), (5, 6)])
def test_blocks_are_counted_over_all_groups(num_tokens: int, expected: int):
    assert KVGroups((None, None, 8)).num_blocks(num_tokens, block_size=4) == expected


def _most_held(groups: KVGroups, num_tokens: int, block_size: int, chunk: int, first: int) -> int:
    """Computes a request in steps of `chunk` behind a first one of `first` tokens, and counts the blocks it holds."""
    pool, tables, most = BlockPool(10_000, block_size), groups.empty_tables(), 0
    ends = [0, *range(min(first, num_tokens), num_tokens, chunk), num_tokens]
    for start, end in pairwise(ends):
        assert groups.grow(tables, start, end, pool)
        most = max(most, pool.num_lent)
    return most


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    windows=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3).map(tuple),
    num_tokens=st.integers(1, 30),
    block_size=st.integers(1, 5),
    chunk=st.integers(1, 12),
)
def test_the_peak_is_what_the_worst_way_of_computing_a_request_holds(
    windows: tuple[int | None, ...], num_tokens: int, block_size: int, chunk: int
):
    groups = KVGroups(windows)
    peak = groups.num_blocks(num_tokens, block_size, chunk)
    held = [
        _most_held(groups, n, block_size, chunk, first)
        for n in range(1, num_tokens + 1)
        for first in range(1, chunk + 1)
    ]
    assert max(held) == peak


def test_gemma_3_270m_holds_a_4096_token_request_in_little_more_than_a_quarter_of_the_blocks():
    assert KVGroups((None,) * 6).num_blocks(4096, 16) == 1536
    assert KVGroups(GEMMA_3_270M).num_blocks(4096, 16, chunk=1) == 256 + 5 * 33
    assert KVGroups(GEMMA_3_270M).num_blocks(4096, 16, chunk=512) == 256 + 5 * 65


def test_no_group_and_an_empty_window_are_refused():
    with pytest.raises(ValueError, match="at least one KV group"):
        KVGroups(())
    with pytest.raises(ValueError, match=r"at least 1 token, got \(None, 0\)"):
        KVGroups((None, 0))
