"""The block tables of one request, one per KV group. Knows windows and block counts: no requests, no tokens."""

from dataclasses import dataclass

from jaxllm.scheduler.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of layers that share a block table; each has the sliding window of its layers, or None.

    The tables of a request are equally long, in every group entry i holds tokens i*block_size and on. A group with a
    window gives blocks wholly behind it back and keeps the table's length: block 0 stands in their place, so that the
    zeros of a table are always its beginning. Attention masks what is behind the window, so nobody reads block 0.
    """

    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("there must be at least one KV group, got none")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"a sliding window must be at least 1 token, got {self.windows}")

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def slides(self) -> bool:
        """Says whether any group gives blocks back while a request runs."""
        return any(window is not None for window in self.windows)

    def empty_tables(self) -> list[list[int]]:
        return [[] for _ in self.windows]

    def first_block(self, group: int, position: int, block_size: int) -> int:
        """Gives the index of the first block that the token at `position` and those behind it see in a group."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // block_size

    def num_blocks(self, num_tokens: int, block_size: int, chunk: int | None = None) -> int:
        """Counts the blocks, of all groups together, that a request of `num_tokens` tokens ever holds at once.

        It is the largest number over all ways of computing it in steps of at most `chunk` tokens (None: any number).
        A step that ends at token e holds, in a group with a window, the blocks from the window of its first token on.
        Ending a block later never takes fewer of them, so the ends within the last block are all that has to be tried.
        """
        chunk = num_tokens if chunk is None else chunk
        return max(
            [
                sum(
                    -(-end // block_size) - self.first_block(group, max(end - chunk, 0), block_size)
                    for group in range(len(self.windows))
                )
                for end in range(max(num_tokens - block_size, 0) + 1, num_tokens + 1)
            ],
            default=0,
        )

    def grow(self, tables: list[list[int]], start: int, end: int, pool: BlockPool) -> bool:
        """Makes room for a step that computes tokens start..end-1: first gives back what its windows have passed.

        It lends nothing when it cannot lend in all groups.
        """
        self.slide(tables, start, pool)
        missing = -(-end // pool.block_size) - len(tables[0])
        if missing <= 0:
            return True
        blocks = pool.lend(missing * len(tables))
        if blocks is None:
            return False
        for group, table in enumerate(tables):
            table.extend(blocks[group * missing : (group + 1) * missing])
        return True

    def slide(self, tables: list[list[int]], position: int, pool: BlockPool) -> None:
        """Gives back the blocks that no token from `position` on sees."""
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            table = tables[group]
            index = min(self.first_block(group, position, pool.block_size), len(table)) - 1
            while index >= 0 and table[index]:
                pool.give_back((table[index],))
                table[index] = 0
                index -= 1

    def release(self, tables: list[list[int]], pool: BlockPool) -> None:
        """Gives every block back and empties the tables; the ends go first, since beginnings are shared most often."""
        for entry in reversed(list(zip(*tables, strict=True))):
            pool.give_back([block for block in entry if block])
        for table in tables:
            table.clear()
