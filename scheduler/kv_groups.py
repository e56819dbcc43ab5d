"""The block tables of one request, one per KV group. Knows windows and block counts: no requests, no tokens."""

from dataclasses import dataclass

from jaxllm.scheduler.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of layers that share a block table; each has the sliding window of its layers, or None.

    The tables of a request are equally long, in every group entry i holds tokens i*block_size and on: a group that
    gives blocks behind its window back will put block 0 in their place and keep the table's length.
    """

    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("there must be at least one KV group, got none")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"a sliding window must be at least 1 token, got {self.windows}")

    def __len__(self) -> int:
        return len(self.windows)

    def empty_tables(self) -> list[list[int]]:
        return [[] for _ in self.windows]

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Counts the blocks, of all groups together, that hold `num_tokens` tokens."""
        return -(-num_tokens // block_size) * len(self.windows)

    def grow(self, tables: list[list[int]], num_tokens: int, pool: BlockPool) -> bool:
        """Extends the tables of all groups to hold `num_tokens`; lends nothing when it cannot lend all."""
        missing = -(-num_tokens // pool.block_size) - len(tables[0])
        if missing <= 0:
            return True
        blocks = pool.lend(missing * len(tables))
        if blocks is None:
            return False
        for group, table in enumerate(tables):
            table.extend(blocks[group * missing : (group + 1) * missing])
        return True

    def release(self, tables: list[list[int]], pool: BlockPool) -> None:
        """Gives every block back and empties the tables; the ends go first, since beginnings are shared most often."""
        for table in tables:
            pool.give_back(reversed(table))
            table.clear()
