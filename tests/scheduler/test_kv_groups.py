import pytest

from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups


def test_growing_extends_the_tables_of_all_groups_alike():
    pool, groups = BlockPool(num_blocks=9, block_size=4), KVGroups((None, 512))
    tables = groups.empty_tables()
    assert groups.grow(tables, 0, 5, pool)
    assert tables == [[1, 2], [3, 4]]
    assert groups.grow(tables, 0, 8, pool)
    assert tables == [[1, 2], [3, 4]]
    assert groups.grow(tables, 0, 9, pool)
    assert tables == [[1, 2, 5], [3, 4, 6]]
    assert pool.num_free == 2


def test_growing_lends_in_no_group_when_it_cannot_lend_in_all():
    pool, groups = BlockPool(num_blocks=6, block_size=4), KVGroups((None, None))
    tables = groups.empty_tables()
    assert groups.grow(tables, 0, 8, pool)
    assert not groups.grow(tables, 0, 9, pool)
    assert tables == [[1, 2], [3, 4]]
    assert pool.num_free == 1


def test_released_tables_are_empty_and_their_ends_are_lent_first():
    pool, groups = BlockPool(num_blocks=5, block_size=4), KVGroups()
    tables = groups.empty_tables()
    groups.grow(tables, 0, 16, pool)
    groups.release(tables, pool)
    assert tables == [[]]
    assert pool.lend(4) == [4, 3, 2, 1]


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 3), (4, 3), (5, 6)])
def test_blocks_are_counted_over_all_groups(num_tokens: int, expected: int):
    assert KVGroups((None, None, 8)).num_blocks(num_tokens, block_size=4) == expected


def test_no_group_and_an_empty_window_are_refused():
    with pytest.raises(ValueError, match="at least one KV group"):
        KVGroups(())
    with pytest.raises(ValueError, match=r"at least 1 token, got \(None, 0\)"):
        KVGroups((None, 0))
