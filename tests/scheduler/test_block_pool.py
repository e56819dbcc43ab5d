import pytest

from jaxllm.scheduler.block_pool import BlockPool


def test_block_0_is_never_lent():
    pool = BlockPool(num_blocks=5, block_size=16)
    assert pool.lend(4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check()


def test_lending_is_all_or_nothing():
    pool = BlockPool(num_blocks=5, block_size=16)
    assert pool.lend(5) is None
    assert (pool.num_free, pool.num_lent, pool.usage) == (4, 0, 0.0)
    assert pool.lend(3) is not None
    assert (pool.num_free, pool.num_lent, pool.usage) == (1, 3, 0.75)
    pool.check()


def test_the_block_unused_for_longest_is_lent_first():
    pool = BlockPool(num_blocks=5, block_size=16)
    pool.lend(3)
    pool.give_back([2])
    pool.give_back([3, 1])
    assert pool.lend(4) == [4, 2, 3, 1]


def test_a_shared_block_is_free_only_when_its_last_reference_is_dropped():
    pool = BlockPool(num_blocks=3, block_size=16)
    pool.lend(1)
    pool.share([1])
    assert pool.references() == {1: 2}
    pool.give_back([1])
    assert pool.references() == {1: 1}
    assert pool.num_free == 1
    pool.check()
    pool.give_back([1])
    assert pool.references() == {}
    assert pool.num_free == 2
    pool.check()


@pytest.mark.parametrize("block", [0, 2])
def test_a_block_that_is_not_lent_can_be_neither_given_back_nor_shared(block: int):
    pool = BlockPool(num_blocks=3, block_size=16)
    pool.lend(1)
    with pytest.raises(ValueError, match=f"block {block} is not lent"):
        pool.give_back([block])
    with pytest.raises(ValueError, match=f"block {block} is not lent"):
        pool.share([block])
    pool.check()


def test_check_notices_a_block_that_is_free_twice():
    pool = BlockPool(num_blocks=3, block_size=16)
    pool._free.append(1)
    with pytest.raises(AssertionError, match="twice"):
        pool.check()


def test_check_notices_a_lost_block():
    pool = BlockPool(num_blocks=3, block_size=16)
    pool._free.popleft()
    with pytest.raises(AssertionError, match="neither free nor cached nor lent"):
        pool.check()


def test_a_pool_without_a_lendable_block_is_refused():
    with pytest.raises(ValueError, match=r"num_blocks must be at least 2 .* got 1"):
        BlockPool(num_blocks=1, block_size=16)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        BlockPool(num_blocks=2, block_size=0)


def test_a_remembered_block_is_cached_when_given_back_and_can_be_shared_again():
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.lend(2)
    pool.remember([1, 2], ["one", "two"])
    pool.give_back([2, 1])
    assert (pool.num_free, pool.num_cached, pool.num_lent, pool.usage) == (3, 2, 0, 0.0)
    assert (pool.find("one"), pool.find("three"), pool.num_unheld([1, 2])) == (1, None, 2)
    pool.share([1, 1])
    assert (pool.references(), pool.num_cached) == ({1: 2}, 1)
    pool.check()


def test_free_blocks_are_lent_first_and_then_the_cached_one_unheld_for_longest():
    pool = BlockPool(num_blocks=5, block_size=16)
    pool.lend(3)
    pool.remember([1, 2, 3], "abc")
    pool.give_back([2, 1, 3])
    pool.share([2])
    pool.give_back([2])
    assert pool.lend(2) == [4, 1]
    assert [pool.find(key) for key in "abc"] == [None, 2, 3]
    assert pool.lend(3) is None
    pool.check()


def test_what_is_remembered_first_stays():
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.lend(2)
    pool.remember([1, 2, 0], ["a", "a", "b"])
    assert (pool.find("a"), pool.key(2), pool.find("b")) == (1, None, None)
    with pytest.raises(ValueError, match="block 3 is not lent"):
        pool.remember([3], ["c"])
    pool.check()


def test_forgetting_frees_cached_blocks_and_leaves_lent_ones_lent():
    pool = BlockPool(num_blocks=4, block_size=16)
    pool.lend(2)
    pool.remember([1, 2], "ab")
    pool.give_back([1])
    pool.forget_all()
    assert (pool.num_cached, pool.num_free, pool.references(), pool.find("b")) == (0, 2, {2: 1}, None)
    pool.give_back([2])
    assert pool.num_cached == 0
    pool.check()


def test_check_notices_a_key_that_outlived_its_block():
    pool = BlockPool(num_blocks=3, block_size=16)
    pool.lend(1)
    pool.remember([1], "a")
    pool.give_back([1])
    pool._cached.clear()
    pool._free.append(1)
    with pytest.raises(AssertionError, match="a free block has a key"):
        pool.check()
