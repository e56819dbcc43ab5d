"""Random traffic on a fake device: whatever happens around a request, it gets the tokens it would get alone.

The device is paged and lazy like a real one. What it writes for a token depends on all that the token's layers see,
read back through the block tables, so that a block shared, copied, kept or given back wrongly shows in the tokens.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.scheduler import kv_cache
from jaxllm.scheduler.batch import RankBatch
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_cache import KVCache
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.request import Request, RequestUpdate
from jaxllm.scheduler.roster import Rows
from jaxllm.scheduler.scheduler import AdmissionError, ScheduledBatch, Scheduler, SchedulerConfig
from jaxllm.scheduler.siblings import Siblings

VOCAB = 16
MAX_MODEL_LEN = 24
PREFIXES = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 5, 5, 5, 5, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]]
SIZES = [(), (4, 8, 12)]  # that steps fill
TARGETS = [None, None, 0.5, 2.5]  # seconds between tokens; what a step takes has no sense here, but stays under 5
TENANTS: list[tuple[str | None, tuple[str, ...]]] = [(None, ()), ("salt", ()), (None, ("adapter",))]

type Windows = tuple[int | None, ...]


def _visible(window: int | None, position: int) -> range:
    """Gives the positions before `position` that it sees."""
    return range(0 if window is None else max(position - window + 1, 0), position)


def _kv(read: Callable[[int, int], int], windows: Windows, position: int, token: int, tenant: int) -> list[int]:
    """Gives what is stored for a token, one value per group."""
    seen = tuple(read(g, i) for g, window in enumerate(windows) for i in _visible(window, position))
    return [hash((g, token, tenant, seen)) for g in range(len(windows))]


def _next_token(values: Sequence[int]) -> int:
    return hash(tuple(values)) % VOCAB


def _tenant(request: Request) -> int:
    return TENANTS.index((request.cache_salt, request.kv_key))


def _tokens_alone(request: Request, windows: Windows) -> tuple[list[int], str]:
    """Gives the output and the finish reason of a request that nothing disturbs."""
    stored: list[list[int]] = []
    output: list[int] = []
    while True:
        known = [*request.prompt_ids, *output]
        while len(stored) < len(known):
            position = len(stored)
            stored.append(_kv(lambda g, i: stored[i][g], windows, position, known[position], _tenant(request)))
        output.append(_next_token(stored[-1]))
        if output[-1] in request.eos_token_ids | request.stop_token_ids:
            return output, "stop"
        if len(output) == request.max_new_tokens:
            return output, "length"


class PagedDevice:
    """One data rank: runs its part of steps at once and in order, and remembers nothing but slots and rows."""

    def __init__(self, pool: BlockPool, windows: Windows, num_rows: int) -> None:
        self.pool = pool
        self.windows = windows
        self.slots: list[list[int | None]] = [[None] * pool.block_size for _ in range(pool.num_blocks)]
        self.last_token = [-1] * num_rows

    def run(self, batch: RankBatch) -> list[int]:
        for source, destination in batch.copies:
            self.slots[destination] = list(self.slots[source])
        self._check_writers(batch)
        return [self._compute(item.request, item.row, item.start, item.count, item.samples) for item in batch.items]

    def _check_writers(self, batch: RankBatch) -> None:
        """A block has one writer in a step, and is shared only if the step fills it."""
        size, references, writers = self.pool.block_size, self.pool.references(), Counter[int]()
        for item in batch.items:
            end = item.start + item.count
            for table in item.request.block_tables:
                written = table[item.start // size : -(-end // size)]
                writers.update(written)
                assert end % size == 0 or references[written[-1]] == 1, "writes a shared block"
        assert max(writers.values(), default=1) == 1, "two write one block"

    def _compute(self, request: Request, row: int, start: int, count: int, samples: bool) -> int:
        size = self.pool.block_size
        known = [*request.prompt_ids, *request.output_ids]
        tables = request.block_tables

        def read(group: int, position: int) -> int:
            block = tables[group][position // size]
            assert block, "a block that the window still sees was given back"
            value = self.slots[block][position % size]
            assert value is not None, "a slot was read that nobody wrote"
            return value

        for position in range(start, start + count):
            token = known[position] if position < len(known) else self.last_token[row]
            values = _kv(read, self.windows, position, token, _tenant(request))
            for table, value in zip(tables, values, strict=True):
                self.slots[table[position // size]][position % size] = value
            if samples and position == start + count - 1:
                self.last_token[row] = _next_token(values)
                return self.last_token[row]
        return -1

    def lose_everything(self) -> None:
        for block in self.slots:
            block[:] = [None] * self.pool.block_size
        self.last_token[:] = [-1] * len(self.last_token)


class Traffic:
    """An engine that is at most one step ahead of the host, and the record of what its users saw."""

    def __init__(
        self,
        seqs: int,
        budget: int,
        num_blocks: int,
        block_size: int,
        windows: Windows,
        target: float | None = None,
        num_ranks: int = 1,
        **options: Any,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN, **options
        )
        self.shape = (num_blocks, block_size)
        self.windows = windows
        self.num_ranks = num_ranks
        self.pace = None if target is None else Pace(target, lambda _: SIZES[1], lambda num_requests: num_requests)
        self.devices = self._new_devices()
        self.scheduler = Scheduler(self.config, self.pools, KVGroups(windows), self.pace)
        self.in_flight: list[tuple[ScheduledBatch, list[int]]] = []
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.started: set[str] = set()
        self.tables: dict[tuple[int, int], tuple[Request, int]] = {}  # by (rank, row): whose, how long
        self.rank_of: dict[str, int] = {}
        self.may_be_overtaken: set[str] = set()
        self.cached_tokens: dict[str, int] = {}
        self.now = 0.0
        self.num_actions = 0
        self.num_quiet = self.num_counted = 0  # tokens of quiet requests: as steps told their number, as they were told
        self.seen = Counter[str]()

    @property
    def pools(self) -> list[BlockPool]:
        return [device.pool for device in self.devices]

    def _new_devices(self) -> list[PagedDevice]:
        pools = [BlockPool(*self.shape) for _ in range(self.num_ranks)]
        return [PagedDevice(pool, self.windows, self.config.max_num_seqs) for pool in pools]

    def add(self, prompt_ids: list[int], max_new_tokens: int, num_samples: int = 1, tenant: int = 0, **fields: Any):
        salt, kv_key = TENANTS[tenant]
        names = [str(len(self.requests) + i) for i in range(num_samples)]
        samples = [
            Request(
                name,
                list(prompt_ids),
                max_new_tokens,
                cache_salt=salt,
                kv_key=kv_key,
                is_quiet=int(name) % 3 == 1,
                **fields,
            )
            for name in names
        ]
        try:
            self.scheduler.add_group(samples)
        except AdmissionError:
            self.seen["refused"] += 1
            return
        for request in samples:
            self.requests[request.request_id], self.tokens[request.request_id] = request, []
        self.may_be_overtaken.update(names[1:])

    def schedule(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            self.seen["nothing to run"] += 1
            assert self.in_flight or not self.scheduler.has_work, "the scheduler is stuck"
            return
        assert not self.scheduler.is_paused
        if self.pace is not None:
            is_decode, context = batch.num_tokens == len(batch.items), sum(i.start + i.count for i in batch.items)
            self.pace.time.observe(batch.num_tokens, is_decode, context, batch.num_tokens % 5)
        assert len(batch.ranks) == self.num_ranks
        assert batch.num_tokens > 0
        self.seen["idle rank"] += any(not part.items for part in batch.ranks)
        self.seen["preempted"] += len(batch.preempted)
        self.seen["preempted with a token on its way"] += sum(r.num_in_flight > 0 for r in batch.preempted)
        new = [item for item in batch.items if item.request.request_id not in self.started]
        self.seen["hit"] += sum(item.start > 0 for item in new)
        self.started.update(item.request.request_id for item in new)
        for item in new:
            self._check_order(item.request)
        tokens = []
        for rank, part in enumerate(batch.ranks):
            self._check_part(rank, part, batch.preempted)
            tokens += self.devices[rank].run(part)
        self.in_flight.append((batch, tokens))

    def _check_part(self, rank: int, part: RankBatch, preempted: Sequence[Request]) -> None:
        assert part.num_tokens <= self.config.max_num_batched_tokens
        assert all(item.count <= self.config.largest_chunk for item in part.items)
        assert part.num_tokens - len(part.items) <= self.config.prefill_share
        assert len({item.row for item in part.items}) == len(part.items)
        here_again = {id(request) for request in preempted} & {id(item.request) for item in part.items}
        assert not here_again or self.num_ranks > 1
        self.seen["copied"] += len(part.copies)
        for request in (*part.admitted, *part.grown):
            self.tables[rank, request.row or 0] = (request, len(request.block_tables[0]))
        for request in part.admitted:
            name = request.request_id
            self.seen["moved to another rank"] += self.rank_of.get(name, rank) != rank
            self.rank_of[name] = rank
        for item in part.items:
            assert item.request.data_rank == rank
            assert self.tables[rank, item.row] == (item.request, len(item.request.block_tables[0])), "it grew in secret"
            self.seen["windows passed"] += any(table[0] == 0 for table in item.request.block_tables)

    def _check_order(self, request: Request) -> None:
        if "cache" in str(self.config.policy):
            return
        rank = self._rank(request)
        for name in self.requests.keys() - self.started - self.ends.keys() - self.may_be_overtaken:
            other = self.requests[name]
            assert rank < self._rank(other), "one was overtaken"

    def _rank(self, request: Request) -> tuple[int, int]:
        of_policy = {"priority": request.priority, "longest-first": -request.max_new_tokens}
        return of_policy.get(str(self.config.policy), 0), int(request.request_id)

    def update(self) -> None:
        updates = self.scheduler.update(*self.in_flight.pop(0))
        self.num_quiet += updates.num_quiet
        self._record(updates)

    def abort(self, which: int) -> None:
        name = self._name(which)
        update = self.scheduler.abort(name)
        assert (update is not None) == self._lives(name)
        self._record([update] if update else [])

    def pause(self, which: int) -> None:
        paused = self.scheduler.pause(self._name(which))
        self.seen["paused"] += paused
        if paused:
            self.may_be_overtaken.add(self._name(which))

    def resume(self, which: int) -> None:
        self.seen["resumed"] += self.scheduler.resume(self._name(which))

    def pause_all(self, drop: bool) -> None:
        self.scheduler.pause_all("drop" if drop else "keep")

    def wait(self, seconds: float) -> None:
        self.now += seconds
        updates = self.scheduler.expire(self.now)
        self.seen["expired"] += len(updates)
        for update in updates:
            deadline = self.requests[update.request_id].deadline
            assert deadline is not None
            assert deadline <= self.now
        self._record(updates)
        assert not [r for n, r in self.requests.items() if self._lives(n) and (r.deadline or 1e9) <= self.now]

    def fail(self, which: int) -> None:
        """One step raises; the device keeps its state."""
        batch, _ = self.in_flight.pop(which % len(self.in_flight))
        self._record(self.scheduler.fail(batch, "failed"))

    def lose_device(self, blame_oldest: bool) -> None:
        """The steps in flight are gone and so is the device's state; the oldest step's requests may be to blame."""
        batches = [batch for batch, _ in self.in_flight]
        self.in_flight.clear()
        if blame_oldest:
            self._record(self.scheduler.fail(batches.pop(0), "lost"))
        self.seen["recomputed"] += self.scheduler.num_running
        self.scheduler.recompute_all(batches)
        for device in self.devices:
            device.lose_everything()

    def move(self) -> None:
        """Another process goes on from a snapshot; what was in flight is lost."""
        before = self.scheduler.snapshot()
        snapshot = json.loads(json.dumps(before))
        self.in_flight.clear()
        self.devices = self._new_devices()
        self.scheduler = Scheduler.restore(snapshot, self.pools, KVGroups(self.windows))
        assert self.scheduler.config == self.config
        self.requests |= self.scheduler.living
        self.seen["moved"] += 1

    def drain(self) -> None:
        """Runs what is left to its end and compares every request with itself alone."""
        self.scheduler.resume_all()
        for name in self.requests:
            self.scheduler.resume(name)
        for _ in range(100 + 60 * len(self.requests)):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.schedule()
            if self.in_flight:
                self.update()
            self.scheduler.check()
        assert self.ends.keys() == self.requests.keys(), "not every request has ended"
        assert not any(pool.num_lent for pool in self.pools)
        assert self.num_quiet == self.num_counted
        for name, request in self.requests.items():
            output, reason = _tokens_alone(request, self.windows)
            if self.ends[name] in ("abort", "error"):
                output = output[: len(self.tokens[name])]
                reason = self.ends[name]
            assert (self.tokens[name], self.ends[name]) == (output, reason)
        stats = self.scheduler.stats
        for name in ("running", "num_scheduled_tokens", "num_preemptions", "prefix_cache_hits"):
            assert sum(getattr(each, name) for each in self.scheduler.rank_stats) == getattr(stats, name)
        assert stats.prefix_cache_hits <= stats.prefix_cache_queries
        assert stats.num_recomputed_tokens <= stats.num_scheduled_tokens
        self.seen["discarded"] += stats.num_discarded_tokens
        self.seen["refound"] += stats.num_refound_tokens > 0

    def _record(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            name = update.request_id
            self.num_counted += update.num_counted
            self.seen["told at once"] += update.num_counted > 1
            assert name not in self.ends, "an ended request was reported again"
            self.tokens[name] += update.token_ids
            assert update.num_output_tokens == len(self.tokens[name])
            assert update.num_cached_tokens < update.num_prompt_tokens
            if name in self.started and update.token_ids:
                assert self.cached_tokens.setdefault(name, update.num_cached_tokens) == update.num_cached_tokens
            if update.finish_reason is not None:
                self.ends[name] = update.finish_reason
                self.seen[update.finish_reason] += 1

    def _name(self, which: int) -> str:
        return str(which % max(len(self.requests), 1))

    def _lives(self, name: str) -> bool:
        return name in self.requests and name not in self.ends


WINDOWS: list[Windows] = [(None,), (None, None), (None, 4), (3, None, 1), (2, 5), (6,)]
POLICIES = ["fcfs", "priority", "longest-first", "cache-aware", "cache-aware-priority"]
PROMPTS = st.tuples(
    st.sampled_from(PREFIXES), st.integers(0, 10), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
).map(lambda parts: parts[0][: parts[1]] + parts[2])


class RandomTraffic(RuleBasedStateMachine):
    """Lets hypothesis choose what happens next, and shrink it when it goes wrong."""

    num_rules = 0

    @initialize(
        seqs=st.integers(1, 4),
        budget=st.integers(1, 12),
        num_blocks=st.integers(6, 30),
        block_size=st.integers(1, 3),
        windows=st.sampled_from(WINDOWS),
        policy=st.sampled_from(POLICIES),
        caps=st.tuples(st.integers(0, 4), st.integers(0, 4)),
        sizes=st.sampled_from(SIZES),
        tpot=st.sampled_from(TARGETS),
        caching=st.booleans(),
        num_ranks=st.sampled_from([1, 2, 3]),
        imbalance=st.sampled_from([0, 10, 100]),
    )
    def start(
        self,
        seqs: int,
        budget: int,
        num_blocks: int,
        block_size: int,
        windows: Windows,
        policy: str,
        caps: tuple[int, int],
        sizes: tuple[int, ...],
        tpot: float | None,
        caching: bool,
        num_ranks: int,
        imbalance: int,
    ) -> None:
        self.traffic = Traffic(
            seqs,
            budget,
            num_blocks,
            block_size,
            windows,
            tpot,
            num_ranks,
            rank_imbalance_tokens=imbalance,
            policy=policy,
            long_prefill_token_threshold=caps[0],
            max_prefill_tokens=caps[1],
            step_sizes=sizes,
            enable_prefix_caching=caching,
        )

    @rule(
        prompt_ids=PROMPTS,
        max_new_tokens=st.integers(1, 8),
        eos=st.integers(0, VOCAB),
        num_samples=st.sampled_from([1, 1, 1, 3]),
        tenant=st.sampled_from([0, 0, 0, 1, 2]),
        priority=st.integers(0, 2),
        time=st.none() | st.integers(1, 30),
        skip=st.sampled_from([False, False, True]),
    )
    def add(
        self,
        prompt_ids: list[int],
        max_new_tokens: int,
        eos: int,
        num_samples: int,
        tenant: int,
        priority: int,
        time: int | None,
        skip: bool,
    ) -> None:
        self.traffic.add(
            prompt_ids,
            max_new_tokens,
            num_samples,
            tenant,
            eos_token_ids=frozenset([eos]),
            stop_token_ids=frozenset([VOCAB - eos]),
            priority=priority,
            deadline=None if time is None else self.traffic.now + time,
            skip_prefix_cache=skip,
        )

    @precondition(lambda self: len(self.traffic.in_flight) < 2)
    @rule(times=st.integers(1, 2))
    def schedule(self, times: int) -> None:
        for _ in range(times - len(self.traffic.in_flight)):
            self.traffic.schedule()

    @precondition(lambda self: self.traffic.in_flight)
    @rule()
    def update(self) -> None:
        self.traffic.update()

    @rule(times=st.integers(1, 6))
    def steps(self, times: int) -> None:
        for _ in range(times):
            if len(self.traffic.in_flight) < 2:
                self.traffic.schedule()
            if self.traffic.in_flight:
                self.traffic.update()

    @rule(which=st.integers(0, 20), action=st.sampled_from(["abort", "pause", "pause", "resume", "resume"]))
    def one(self, which: int, action: str) -> None:
        getattr(self.traffic, action)(which)

    @rule(drop=st.booleans(), steps=st.integers(0, 2))
    def pause_all(self, drop: bool, steps: int) -> None:
        self.traffic.pause_all(drop)
        for _ in range(steps):
            self.traffic.schedule()
            if self.traffic.in_flight:
                self.traffic.update()
        self.traffic.scheduler.resume_all()

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.traffic.wait(seconds)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.traffic.scheduler.reset_prefix_cache() == (not any(pool.num_lent for pool in self.traffic.pools))

    @precondition(lambda self: self.traffic.in_flight)
    @rule(which=st.integers(0, 1))
    def fail(self, which: int) -> None:
        self.traffic.fail(which)

    @precondition(lambda self: self.traffic.in_flight)
    @rule(blame_oldest=st.booleans())
    def lose_device(self, blame_oldest: bool) -> None:
        self.traffic.lose_device(blame_oldest)

    @rule()
    def move(self) -> None:
        self.traffic.move()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.scheduler.check()
            RandomTraffic.num_rules += 1

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.drain()


class TestRandomTraffic(RandomTraffic.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50, derandomize=True, deadline=None)

    def test_every_request_gets_the_tokens_it_would_get_alone(self) -> None:
        RandomTraffic.num_rules = 0
        self.runTest()
        assert RandomTraffic.num_rules >= 10_000


def _long_traffic(seed: int) -> Counter[str]:
    """Plays a few hundred mostly ordinary actions: many arrivals, few aborts and failures."""
    rng = random.Random(seed)
    traffic = Traffic(
        seqs=rng.randint(1, 6),
        budget=rng.randint(1, 16),
        num_blocks=rng.randint(8, 60),
        block_size=rng.randint(1, 4),
        windows=rng.choice(WINDOWS),
        target=rng.choice(TARGETS),
        num_ranks=rng.choice([1, 2, 3]),
        rank_imbalance_tokens=rng.choice([0, 20]),
        policy=rng.choice(POLICIES),
        enable_prefix_caching=rng.random() < 0.7,
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        max_prefill_tokens=rng.choice([0, 0, 2]),
        step_sizes=rng.choice(SIZES),
    )
    for _ in range(200):
        action = rng.random()
        if action < 0.2:
            tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
            traffic.add(
                rng.choice(PREFIXES)[: rng.randint(0, 10)] + tail,
                rng.randint(1, 14),
                rng.choice([1, 1, 1, 4]),
                rng.choice([0, 0, 0, 1, 2]),
                eos_token_ids=frozenset([rng.randrange(VOCAB)]),
                stop_token_ids=frozenset([rng.randrange(VOCAB)]),
                priority=rng.randrange(2),
                deadline=rng.choice([None, None, traffic.now + 2]),
            )
        elif action < 0.22:
            traffic.abort(rng.randrange(100))
        elif action < 0.23 and traffic.in_flight:
            traffic.fail(rng.randrange(2))
        elif action < 0.24 and traffic.in_flight:
            traffic.lose_device(blame_oldest=rng.random() < 0.5)
        elif action < 0.25:
            traffic.move()
        elif action < 0.27:
            traffic.pause(rng.randrange(100))
        elif action < 0.3:
            traffic.resume(rng.randrange(100))
        elif action < 0.32:
            traffic.wait(1.0)
        elif len(traffic.in_flight) == 2 or (traffic.in_flight and rng.random() < 0.4):
            traffic.update()
        else:
            traffic.schedule()
        traffic.scheduler.check()
    traffic.drain()
    return traffic.seen


def test_long_traffic_meets_every_rare_event_and_still_gives_the_tokens_of_running_alone():
    seen = Counter[str]()
    for seed in range(150):
        seen += _long_traffic(seed)
    rare = ("preempted", "preempted with a token on its way", "discarded", "recomputed", "refused", "nothing to run")
    new = ("told at once", "copied", "hit", "refound", "windows passed", "paused", "resumed", "expired", "moved")
    ranks = ("idle rank", "moved to another rank")
    for event in (*rare, *new, *ranks, "stop", "length", "abort", "error"):
        assert seen[event] >= 10, f"{event}: {seen[event]} times"


def _double_free(patch: pytest.MonkeyPatch) -> None:
    def give_back(pool: BlockPool, blocks: Sequence[int]) -> None:
        for block in blocks:
            pool._references[block] = max(pool._references[block] - 1, 0)
            pool._free.append(block)

    patch.setattr(BlockPool, "give_back", give_back)


def _lost_reference(patch: pytest.MonkeyPatch) -> None:
    share = BlockPool.share
    patch.setattr(BlockPool, "share", lambda pool, blocks: share(pool, [b for b in blocks if not pool._references[b]]))


def _stale_hash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_evict", lambda pool: pool._cached.popitem(last=False)[0])


def _leaked_row(patch: pytest.MonkeyPatch) -> None:
    def take_back(rows: Rows, request: Request) -> None:
        rows.running.remove(request)
        request.row = request.data_rank = None

    patch.setattr(Rows, "take_back", take_back)


def _hash_without_tenant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("jaxllm.scheduler.block_hash.root_digest", lambda cache_salt, kv_key: b"")


def _hash_without_parent(patch: pytest.MonkeyPatch) -> None:
    def block_hashes(request: Request, num_blocks: int, size: int) -> list[bytes]:
        known = request.prompt_ids + request.output_ids
        return [bytes(known[i * size : (i + 1) * size]) for i in range(num_blocks)]

    patch.setattr(kv_cache, "block_hashes", block_hashes)


def _no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "copies", lambda *_: [])


def _window_slides_too_far(patch: pytest.MonkeyPatch) -> None:
    slide = KVGroups.slide
    patch.setattr(
        KVGroups, "slide", lambda groups, tables, at, pool: slide(groups, tables, at + 1 + pool.block_size, pool)
    )


def _cache_survives_a_lost_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "forget_all", lambda pool: None)


def _fork_of_a_prompt_that_is_not_computed(patch: pytest.MonkeyPatch) -> None:
    def release(siblings: Siblings) -> list[Request]:
        released: list[Request] = []
        for group in siblings._started.values():
            group.ready_on = group.leader.data_rank
            released += group.held.values()
            group.released |= group.held
            group.held = {}
        return released

    patch.setattr(Siblings, "release", release)


@pytest.mark.parametrize(
    "plant",
    [
        _double_free,
        _lost_reference,
        _stale_hash,
        _leaked_row,
        _hash_without_tenant,
        _hash_without_parent,
        _no_copy_on_write,
        _window_slides_too_far,
        _cache_survives_a_lost_device,
        _fork_of_a_prompt_that_is_not_computed,
    ],
)
def test_a_planted_mistake_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        sum((_long_traffic(seed) for seed in range(40)), Counter())
