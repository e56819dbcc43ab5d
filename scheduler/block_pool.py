"""Lends the blocks of the KV cache. Knows block ids only: no requests, no groups, no tokens, no arrays."""

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Blocks 1..num_blocks-1, lent with a reference count; block 0 is never lent, since padding tokens write there.

    The free blocks queue up in the order in which they were given back, so the one unused for longest is lent first:
    the order in which a prefix cache would evict the blocks that it still remembers.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is reserved for padding), got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_blocks))
        self._references = [0] * num_blocks

    @property
    def num_lendable(self) -> int:
        """Counts the blocks that requests can ever hold together."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_lent(self) -> int:
        return self.num_lendable - len(self._free)

    @property
    def usage(self) -> float:
        """Gives the share of the lendable blocks that is lent, from 0 to 1."""
        return self.num_lent / self.num_lendable

    def lend(self, count: int) -> list[int] | None:
        """Lends `count` blocks with one reference each, or none of them (None) when fewer are free."""
        free = self._free
        if count > len(free):
            return None
        blocks = [free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each of some lent blocks."""
        for block in blocks:
            self._check_lent(block)
            self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drops one reference of each block, in this order; a block without references is free again."""
        for block in blocks:
            self._check_lent(block)
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def references(self) -> dict[int, int]:
        """Gives the reference count of every lent block."""
        return {block: count for block, count in enumerate(self._references) if count}

    def check(self) -> None:
        """Every block but 0 is either free or lent, and never both."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free queue"
        assert 0 not in free, "block 0 is in the free queue"
        assert self._references[0] == 0, "block 0 is lent"
        assert all(count >= 0 for count in self._references), "a reference count is below 0"
        assert free.isdisjoint(self.references()), "a block is both free and lent"
        assert len(free) + len(self.references()) == self.num_lendable, "a block is neither free nor lent"

    def _check_lent(self, block: int) -> None:
        if self._references[block] < 1:
            raise ValueError(f"block {block} is not lent")
