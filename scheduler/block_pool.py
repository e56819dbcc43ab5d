"""Lends the blocks of the KV cache. Knows block ids and opaque keys: no requests, no groups, no tokens, no arrays."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable


class BlockPool:
    """Blocks 1..num_blocks-1, lent with a reference count; block 0 is never lent, since padding tokens write there.

    A block is lent, or cached (nobody holds it, but a key says what it contains), or free. Free blocks are lent first,
    then the cached one that nobody has held for longest, which is forgotten by that.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is reserved for padding), got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one unheld for longest comes first
        self._references = [0] * num_blocks
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}  # of lent and cached blocks

    @property
    def num_lendable(self) -> int:
        """Counts the blocks that requests can ever hold together."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Counts the blocks that can be lent now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Counts the blocks that nobody holds and whose contents are remembered."""
        return len(self._cached)

    @property
    def num_lent(self) -> int:
        return self.num_lendable - self.num_free

    @property
    def usage(self) -> float:
        """Gives the share of the lendable blocks that is lent, from 0 to 1."""
        return self.num_lent / self.num_lendable

    def lend(self, count: int) -> list[int] | None:
        """Lends `count` blocks with one reference each, or none of them (None) when fewer are free."""
        if count > self.num_free:
            return None
        free, references = self._free, self._references
        blocks = [free.popleft() if free else self._evict() for _ in range(count)]
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each of some lent or cached blocks."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
            else:
                self._check_lent(block)
            self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Drops one reference of each block, in this order; one without references is cached or free again."""
        for block in blocks:
            self._check_lent(block)
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def remember(self, blocks: Iterable[int], keys: Iterable[Hashable]) -> None:
        """Notes what some lent blocks contain; a key or a block that is known already stays as it is, and so does 0."""
        block_of, key_of = self._block_of, self._key_of
        for block, key in zip(blocks, keys, strict=True):
            if not block or key in block_of or block in key_of:
                continue
            self._check_lent(block)
            block_of[key] = block
            key_of[block] = key

    def find(self, key: Hashable) -> int | None:
        """Gives the block that contains what the key stands for."""
        return self._block_of.get(key)

    def key(self, block: int) -> Hashable | None:
        """Gives what is remembered of a block's contents."""
        return self._key_of.get(block)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """Counts those of some blocks that nobody holds, so that sharing them takes them from the free ones."""
        return sum([not self._references[block] for block in blocks])

    def forget_all(self) -> None:
        """Forgets the contents of every block; lent ones stay lent."""
        self._block_of.clear()
        self._key_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def references(self) -> dict[int, int]:
        """Gives the reference count of every lent block."""
        return {block: count for block, count in enumerate(self._references) if count}

    def check(self) -> None:
        """Every block but 0 is free, cached or lent, in one of these only, and keys and blocks match."""
        free, lent = set(self._free), self.references()
        assert len(free) == len(self._free), "a block is twice in the free queue"
        assert 0 not in free, "block 0 is in the free queue"
        assert not self._references[0], "block 0 is lent"
        assert all(count >= 0 for count in self._references), "a reference count is below 0"
        assert free.isdisjoint(lent), "a block is both free and lent"
        assert free.isdisjoint(self._cached), "a block is both free and cached"
        assert self._cached.keys().isdisjoint(lent), "a block is both cached and lent"
        everywhere = len(free) + len(self._cached) + len(lent)
        assert everywhere == self.num_lendable, "a block is neither free nor cached nor lent"
        assert self._cached.keys() <= self._key_of.keys(), "a cached block has no key"
        assert free.isdisjoint(self._key_of), "a free block has a key"
        assert len(self._key_of) == len(self._block_of), "a key names a block that does not name it"
        assert all(self._block_of.get(key) == block for block, key in self._key_of.items()), "a key names another block"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def _check_lent(self, block: int) -> None:
        if self._references[block] < 1:
            raise ValueError(f"block {block} is not lent")
