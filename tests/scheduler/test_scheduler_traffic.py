"""Random traffic on a fake device: whatever happens around a request, it gets the tokens it would get alone.

The device is paged and lazy like a real one: it writes token ids where KV would go, samples from what it reads back
through the block tables, and feeds a token that the host has not read yet from its own row state.
"""

import random
import zlib
from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request, RequestUpdate
from jaxllm.scheduler.scheduler import AdmissionError, ScheduledBatch, Scheduler, SchedulerConfig

VOCAB = 16
MAX_MODEL_LEN = 24


def _next_token(context: Sequence[int]) -> int:
    return zlib.crc32(bytes(context)) % VOCAB


def _tokens_alone(request: Request) -> tuple[list[int], str]:
    """Gives the output and the finish reason of a request that nothing disturbs."""
    output: list[int] = []
    while True:
        output.append(_next_token([*request.prompt_ids, *output]))
        if output[-1] in request.eos_token_ids | request.stop_token_ids:
            return output, "stop"
        if len(output) == request.max_new_tokens:
            return output, "length"


class PagedDevice:
    """Runs steps at once and in order, and remembers nothing but slots and rows."""

    def __init__(self, num_blocks: int, block_size: int, num_rows: int) -> None:
        self.block_size = block_size
        self.slots = [[-1] * block_size for _ in range(num_blocks)]
        self.last_token = [-1] * num_rows

    def run(self, batch: ScheduledBatch) -> list[int]:
        for item in batch.items:
            known = [*item.request.prompt_ids, *item.request.output_ids]
            for position in range(item.start, item.start + item.count):
                token = known[position] if position < len(known) else self.last_token[item.row]
                for table in item.request.block_tables:
                    assert table[position // self.block_size] != 0
                    self.slots[table[position // self.block_size]][position % self.block_size] = token
        return [
            self._sample(item.request, item.row, item.start + item.count) if item.samples else -1
            for item in batch.items
        ]

    def _sample(self, request: Request, row: int, num_tokens: int) -> int:
        contexts = [
            [self.slots[table[i // self.block_size]][i % self.block_size] for i in range(num_tokens)]
            for table in request.block_tables
        ]
        assert all(context == contexts[0] for context in contexts)
        assert min(contexts[0]) >= 0, "a token was sampled from a slot that nobody wrote"
        self.last_token[row] = _next_token(contexts[0])
        return self.last_token[row]

    def lose_everything(self) -> None:
        for block in self.slots:
            block[:] = [-1] * self.block_size
        self.last_token[:] = [-1] * len(self.last_token)


class Traffic:
    """An engine that is at most one step ahead of the host, and the record of what its users saw."""

    def __init__(self, seqs: int, budget: int, num_blocks: int, block_size: int, groups: int) -> None:
        config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN)
        self.limits = config
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(config, self.pool, KVGroups((None,) * groups))
        self.device = PagedDevice(num_blocks, block_size, seqs)
        self.in_flight: list[tuple[ScheduledBatch, list[int]]] = []
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.started: list[int] = []
        self.seen = Counter[str]()

    def add(self, prompt_ids: list[int], max_new_tokens: int, eos: int, stop: int) -> None:
        name = str(len(self.requests))
        request = Request(name, prompt_ids, max_new_tokens, frozenset([eos]), frozenset([stop]))
        try:
            self.scheduler.add(request)
        except AdmissionError:
            self.seen["refused"] += 1
            return
        self.requests[name], self.tokens[name] = request, []

    def schedule(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            self.seen["nothing to run"] += 1
            assert self.in_flight or not self.scheduler.has_work, "the scheduler is stuck"
            return
        assert 0 < batch.num_tokens <= self.limits.max_num_batched_tokens
        assert len({item.row for item in batch.items}) == len(batch.items)
        self.seen["preempted"] += len(batch.preempted)
        self.seen["preempted with a token on its way"] += sum(r.num_in_flight > 0 for r in batch.preempted)
        assert not {id(request) for request in batch.preempted} & {id(item.request) for item in batch.items}
        names = [int(item.request.request_id) for item in batch.items]
        self.started += [name for name in names if name not in self.started]
        assert self.started == sorted(self.started), "a request overtook another"
        self.in_flight.append((batch, self.device.run(batch)))

    def update(self) -> None:
        self._record(self.scheduler.update(*self.in_flight.pop(0)))

    def abort(self, which: int) -> None:
        name = str(which % max(len(self.requests), 1))
        update = self.scheduler.abort(name)
        assert (update is not None) == (name in self.requests and name not in self.ends)
        self._record([update] if update else [])

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
        self.device.lose_everything()

    def drain(self) -> None:
        """Runs what is left to its end and compares every request with itself alone."""
        while self.scheduler.has_work or self.in_flight:
            self.schedule()
            if self.in_flight:
                self.update()
            self.scheduler.check()
        assert self.pool.num_lent == 0
        assert self.ends.keys() == self.requests.keys()
        for name, request in self.requests.items():
            output, reason = _tokens_alone(request)
            if self.ends[name] in ("abort", "error"):
                output = output[: len(self.tokens[name])]
                reason = self.ends[name]
            assert (self.tokens[name], self.ends[name]) == (output, reason)
        self.seen["discarded"] = self.scheduler.stats.num_discarded_tokens
        assert self.scheduler.stats.num_preemptions == self.seen["preempted"]

    def _record(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            name = update.request_id
            assert name not in self.ends, "an ended request was reported again"
            self.tokens[name] += update.token_ids
            assert update.num_output_tokens == len(self.tokens[name])
            if update.finish_reason is not None:
                self.ends[name] = update.finish_reason
                self.seen[update.finish_reason] += 1


class RandomTraffic(RuleBasedStateMachine):
    """Lets hypothesis choose what happens next, and shrink it when it goes wrong."""

    @initialize(
        seqs=st.integers(1, 4),
        budget=st.integers(1, 12),
        num_blocks=st.integers(4, 20),
        block_size=st.integers(1, 3),
        groups=st.integers(1, 2),
    )
    def start(self, seqs: int, budget: int, num_blocks: int, block_size: int, groups: int) -> None:
        self.traffic = Traffic(seqs, budget, num_blocks, block_size, groups)

    @rule(
        prompt_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
        max_new_tokens=st.integers(1, 8),
        eos=st.integers(0, VOCAB),
    )
    def add(self, prompt_ids: list[int], max_new_tokens: int, eos: int) -> None:
        self.traffic.add(prompt_ids, max_new_tokens, eos, stop=VOCAB - eos)

    @precondition(lambda self: len(self.traffic.in_flight) < 2)
    @rule()
    def schedule(self) -> None:
        self.traffic.schedule()

    @precondition(lambda self: self.traffic.in_flight)
    @rule()
    def update(self) -> None:
        self.traffic.update()

    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        self.traffic.abort(which)

    @precondition(lambda self: self.traffic.in_flight)
    @rule(which=st.integers(0, 1))
    def fail(self, which: int) -> None:
        self.traffic.fail(which)

    @precondition(lambda self: self.traffic.in_flight)
    @rule(blame_oldest=st.booleans())
    def lose_device(self, blame_oldest: bool) -> None:
        self.traffic.lose_device(blame_oldest)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.drain()


RandomTraffic.TestCase.settings = settings(max_examples=150, stateful_step_count=40, derandomize=True, deadline=None)
test_random_traffic_gives_every_request_the_tokens_it_would_get_alone = RandomTraffic.TestCase


def _long_traffic(seed: int) -> Counter[str]:
    """Plays a few hundred mostly ordinary actions: many arrivals, few aborts and failures."""
    rng = random.Random(seed)
    traffic = Traffic(
        seqs=rng.randint(1, 6),
        budget=rng.randint(1, 16),
        num_blocks=rng.randint(6, 40),
        block_size=rng.randint(1, 4),
        groups=rng.randint(1, 3),
    )
    for _ in range(200):
        action = rng.random()
        if action < 0.2:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
            traffic.add(prompt, rng.randint(1, 14), eos=rng.randrange(VOCAB), stop=rng.randrange(VOCAB))
        elif action < 0.22:
            traffic.abort(rng.randrange(100))
        elif action < 0.23 and traffic.in_flight:
            traffic.fail(rng.randrange(2))
        elif action < 0.24 and traffic.in_flight:
            traffic.lose_device(blame_oldest=rng.random() < 0.5)
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
    for event in (*rare, "stop", "length", "abort", "error"):
        assert seen[event] >= 10, f"{event}: {seen[event]} times"
