"""What requests hold of the KV cache, and what of it is remembered for others. Knows no queue, no rows, no budget.

A block enters the prefix cache when all its tokens are in dispatched steps and known to the host: so a token that is
discarded late never gets in. Whoever finds it may use it at once, even in the very step that writes it, since a step
writes the keys and values of all its tokens before any of them is read, and steps run in the order of their dispatch.
A copy of a block is made before its step, so a source must have been written by an earlier one.

When the weights change, a new generation of KV begins. What is of an older one, if only in part, is never remembered.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.scheduler.block_hash import block_hashes
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Prefix:
    """The beginning of a request that is in the cache already: the blocks to share, the one of each group to copy."""

    num_tokens: int
    tables: list[list[int]]
    sources: tuple[int, ...] = ()  # blocks, one per group, that hold the first of the tokens behind the shared ones
    is_fork: bool = False

    @property
    def blocks(self) -> list[int]:
        return [block for table in self.tables for block in table if block]


class KVCache:
    """The block pool with the tables of requests on top, and the prefix cache."""

    def __init__(self, pool: BlockPool, groups: KVGroups, chunk: int, enable_prefix_caching: bool) -> None:
        self.pool = pool
        self.groups = groups
        self.chunk = chunk  # tokens of one request in one step, at most
        self.enable_prefix_caching = enable_prefix_caching
        self.generation = 0
        self._slides = groups.slides
        self._suffixes = [group.to_bytes(2) if group else b"" for group in range(len(groups))]  # key = digest + suffix

    def looks_up(self, request: Request) -> bool:
        """Says whether the prefix cache is asked for this request."""
        return self.enable_prefix_caching and not request.skip_prefix_cache

    def prepare(self, request: Request) -> None:
        """Names the blocks of a new request's prompt, so that its step need not."""
        if self.enable_prefix_caching:
            block_hashes(request, request.num_prompt // self.pool.block_size, self.pool.block_size)

    def find(self, request: Request) -> Prefix:
        """Gives the longest beginning of a request whose blocks are remembered, in all groups as far as each needs it.

        One token at least is left to compute, for the next one is sampled from it.
        """
        tables = self.groups.empty_tables()
        if not self.looks_up(request):
            return Prefix(0, tables)
        size, find = self.pool.block_size, self.pool.find
        hashes = block_hashes(request, (request.num_known - 1) // size, size)
        length = self._longest_hit(hashes, (request.num_known - 1) // size)
        for group, table in enumerate(tables):
            first = self.groups.first_block(group, length * size, size)
            table += [0] * first + [find(hashes[i] + self._suffixes[group]) or 0 for i in range(first, length)]
        return Prefix(length * size, tables)

    def fork(self, request: Request, source: Request) -> Prefix | None:
        """Gives all but the last token of a prompt that an earlier step has computed for another request.

        None when the source's windows have passed what this one would need, or its KV is of older weights.
        """
        if source.kv_generation != self.generation:
            return None
        size, start = self.pool.block_size, request.num_prompt - 1
        length, has_rest = start // size, start % size > 0
        tables = self.groups.empty_tables()
        for group, table in enumerate(tables):
            first = self.groups.first_block(group, start, size)
            table += [0] * min(first, length) + source.block_tables[group][first:length]
            if not all(source.block_tables[group][first : length + has_rest]):
                return None
        return Prefix(start, tables, tuple(table[length] for table in source.block_tables) if has_rest else (), True)

    def admit(self, request: Request, prefix: Prefix, end: int, room: int) -> bool:
        """Lends a waiting request its prefix and the blocks up to token `end`; takes nothing when it cannot take all.

        It also refuses when the free blocks would not do for a request of `room` tokens.
        """
        pool, groups = self.pool, self.groups
        num_unheld = pool.num_unheld(prefix.blocks)
        num_missing = (-(-end // pool.block_size) - len(prefix.tables[0])) * len(groups)
        if num_missing + num_unheld > pool.num_free:
            return False
        if room > end:
            num_held = len(prefix.blocks) - num_unheld
            if groups.num_blocks(room, pool.block_size, self.chunk) - num_held > pool.num_free:
                return False
        pool.share(prefix.blocks)
        request.block_tables = prefix.tables
        grown = groups.grow(request.block_tables, prefix.num_tokens, end, pool)
        assert grown, "the blocks counted above were not there"
        request.num_slots = len(request.block_tables[0]) * pool.block_size
        request.num_remembered = prefix.num_tokens // pool.block_size
        request.kv_generation = self.generation
        return True

    def copies(self, request: Request, prefix: Prefix) -> list[tuple[int, int]]:
        """Gives (source, destination) for the blocks of an admitted request that begin as copies."""
        index = prefix.num_tokens // self.pool.block_size
        return [(source, request.block_tables[group][index]) for group, source in enumerate(prefix.sources)]

    def grow(self, request: Request, start: int, end: int) -> bool:
        """Makes room for tokens start..end-1 of a running request, or lends nothing."""
        if self._slides:
            self.remember(request)
        if not self.groups.grow(request.block_tables, start, end, self.pool):
            return False
        request.num_slots = len(request.block_tables[0]) * self.pool.block_size
        return True

    def grow_singles(self, requests: Sequence[Request]) -> int:
        """Makes room for a token of each of some requests whose tables are full; counts the first ones that got it."""
        pool, num_groups = self.pool, len(self.groups)
        if self._slides or len(requests) * num_groups > pool.num_free:
            for place, request in enumerate(requests):
                if not self.grow(request, request.num_slots, request.num_slots + 1):
                    return place
            return len(requests)
        blocks = iter(pool.lend(len(requests) * num_groups) or ())
        for request in requests:
            for table in request.block_tables:
                table.append(next(blocks))
            request.num_slots += pool.block_size
        return len(requests)

    def drop(self, request: Request) -> None:
        """Takes the KV of a running request, which is to be computed anew."""
        self.release(request)
        request.num_to_recompute += request.num_computed
        request.num_computed = 0
        request.num_preemptions += 1

    def release(self, request: Request) -> None:
        """Takes back all that a request holds; what is remembered of it stays in the cache until it is evicted."""
        self.remember(request)
        self.groups.release(request.block_tables, self.pool)
        request.num_slots = 0

    def remember(self, request: Request) -> None:
        """Enters the blocks of a running request that have become full and known into the prefix cache.

        That is done when a chunk of a prompt is dispatched and before blocks are taken back: others may wait for a
        prompt, but nobody for an output, whose blocks are dearer to name one by one while it grows.
        """
        size, num_known = self.pool.block_size, request.num_prompt + len(request.output_ids)
        num_full = (num_known if num_known < request.num_computed else request.num_computed) // size
        if num_full <= request.num_remembered or not self.enable_prefix_caching:
            return
        if request.kv_generation != self.generation:
            return
        hashes = block_hashes(request, num_full, size)[request.num_remembered : num_full]
        for suffix, table in zip(self._suffixes, request.block_tables, strict=True):
            blocks = table[request.num_remembered : num_full]
            keys = [digest + suffix for digest in hashes]
            self.pool.remember(blocks, keys)
        request.num_remembered = num_full

    def begin_generation(self) -> None:
        """Forgets all prefixes, and remembers nothing that requests admitted so far still hold."""
        self.pool.forget_all()
        self.generation += 1

    def utilisation(self, running: list[Request]) -> float:
        """Gives the share of the lent slots that hold a token, 1 when nothing is lent.

        Only the last block of each table has empty slots, and it is never a shared one unless it is full.
        """
        size = self.pool.block_size
        num_empty = sum([len(request.block_tables[0]) * size - request.num_computed for request in running])
        num_slots = self.pool.num_lent * size
        return 1.0 - num_empty * len(self.groups) / num_slots if num_slots else 1.0

    def check(self, running: list[Request]) -> None:
        """The tables account for every block lent, and what is remembered of a block is what its holders have in it."""
        self.pool.check()
        size, held = self.pool.block_size, Counter[int]()
        for request in running:
            request.check_running(size)
            hashes = block_hashes(request, request.num_known // size, size)
            for group, table in enumerate(request.block_tables):
                first = next((index for index, block in enumerate(table) if block), len(table))
                needed = self.groups.first_block(group, request.num_computed, size)
                assert all(table[first:]), "block 0 stands behind the beginning of a table"
                assert first <= needed, "a block that the window still needs is gone"
                held.update(table[first:])
                for index in range(first, len(table)):
                    key = self.pool.key(table[index])
                    assert key is None or (index < len(hashes) and key == hashes[index] + self._suffixes[group]), (
                        "a stale hash"
                    )
                    assert key is None or request.kv_generation == self.generation, "KV of older weights can be found"
        assert held == self.pool.references(), "the tables do not account for the blocks lent"

    def _longest_hit(self, hashes: list[bytes], limit: int) -> int:
        """Counts the blocks of the longest hit, `limit` at most.

        From the longest thinkable one on, a missing block that a group needs shortens the hit to what is before it.
        """
        find, groups, size = self.pool.find, self.groups, self.pool.block_size
        length = limit
        for group, window in enumerate(groups.windows):
            if window is None:
                length = next((i for i in range(length) if find(hashes[i] + self._suffixes[group]) is None), length)
        before = None
        while length != before:
            before = length
            for group, window in enumerate(groups.windows):
                index = length - 1
                while window is not None and index >= groups.first_block(group, length * size, size):
                    if find(hashes[index] + self._suffixes[group]) is None:
                        length = index
                    index -= 1
        return length
