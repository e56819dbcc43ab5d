"""The engine's loop on a clock of its own: arrivals, the real scheduler, one step ahead of the host. Draws no figures.

The host works on a step while the devices run the one before, as in the engine: it schedules and launches step n+1,
then waits for the tokens of step n. A step begins on the devices when it has been launched and they are free.
"""

import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from jaxllm.config.errors import InputError
from jaxllm.engine.buckets import Buckets, StepShape
from jaxllm.scheduler.batch import ScheduledBatch, SchedulerStats
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import AdmissionError, Scheduler, SchedulerConfig
from jaxllm.simulate.arrivals import Arrival

_TOKEN = 7  # any: no request stops at one


class Device(Protocol):
    """What a step costs, in seconds."""

    def device_seconds(self, padded: StepShape, batch: ScheduledBatch) -> float: ...
    def host_seconds(self, num_requests: int) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the engine is started with; a pool, of `num_blocks`, is that of one data rank."""

    scheduler: SchedulerConfig
    buckets: Buckets
    num_blocks: int
    block_size: int = 16
    windows: tuple[int | None, ...] = (None,)
    num_ranks: int = 1
    target_tpot: float | None = None  # seconds


class StepRecord(NamedTuple):
    """A step when it was launched; tuples are by data rank."""

    launched: float
    shape: StepShape
    num_tokens: tuple[int, ...]  # without padding
    num_requests: tuple[int, ...]  # in the step
    num_waiting: int
    num_running: tuple[int, ...]
    kv_usage: tuple[float, ...]


@dataclass(slots=True)
class Record:
    """Everything that happened: steps in their order, and when each read brought a token to which requests."""

    arrivals: Sequence[Arrival]
    arrived: list[float] = field(default_factory=list)  # on the clock, in the order of the arrivals
    steps: list[StepRecord] = field(default_factory=list)
    read: list[float] = field(default_factory=list)  # when the tokens of each step were there
    sampled: list[list[int]] = field(default_factory=list)  # the requests that they belong to, by place
    busy: float = 0.0  # of the devices
    rank_stats: list[SchedulerStats] = field(default_factory=list)


def simulate(arrivals: Sequence[Arrival], setting: Setting, device: Device) -> Record:
    """Lets requests arrive, in the order given, and runs them all to their ends.

    Raises:
        InputError: a request could never run.
    """
    collects = gc.isenabled()
    gc.disable()  # nothing here is cyclic, and the collector would look at every token's update
    try:
        return _Simulation(arrivals, setting, device).run()
    finally:
        if collects:
            gc.enable()


class _Simulation:
    def __init__(self, arrivals: Sequence[Arrival], setting: Setting, device: Device):
        self._arrivals = arrivals
        self._buckets = setting.buckets
        self._block_size = setting.block_size
        self._device = device
        self._pools = [BlockPool(setting.num_blocks, setting.block_size) for _ in range(setting.num_ranks)]
        self._pace = None
        if setting.target_tpot is not None:
            self._pace = Pace(setting.target_tpot, setting.buckets.mixed_sizes, setting.buckets.decode_size)
        self._scheduler = Scheduler(setting.scheduler, self._pools, KVGroups(setting.windows), self._pace)
        self._record = Record(arrivals)
        self._places: dict[str, int] = {}
        self._in_flight: deque[tuple[ScheduledBatch, StepShape, float]] = deque()
        self._now = 0.0  # of the host
        self._free_from = 0.0  # the devices
        self._busy_since: float | None = None  # as in the engine: what its pace is told
        self._num_calls = 0  # of the engine's step

    def run(self) -> Record:
        record, scheduler = self._record, self._scheduler
        while len(record.arrived) < len(self._arrivals) or scheduler.has_work or self._in_flight:
            self._let_arrive()
            batch = scheduler.schedule()
            if batch is not None:
                self._launch(batch)
            if len(self._in_flight) > (batch is not None):
                self._read_oldest()
        record.rank_stats = scheduler.rank_stats
        return record

    def _let_arrive(self) -> None:
        """Adds who has come by now; an engine without work waits for the next one."""
        self._num_calls += 1
        place, arrivals = len(self._record.arrived), self._arrivals
        if place == len(arrivals):
            return
        by_steps = arrivals[place].step is not None
        if not self._scheduler.has_work and not self._in_flight:
            self._now = max(self._now, arrivals[place].time)
            self._num_calls = max(self._num_calls, arrivals[place].step or 0)
        while place < len(arrivals):
            arrival = arrivals[place]
            if (arrival.step or 0) > self._num_calls or arrival.time > self._now:
                return
            self._add(arrival, place)
            self._record.arrived.append(self._now if by_steps else arrival.time)
            place += 1

    def _add(self, arrival: Arrival, place: int) -> None:
        name = str(place)
        request = Request(name, [0] * arrival.input_len, arrival.output_len)
        # In the place of digests of tokens that nobody knows: no request finds another's blocks, each finds its own.
        num_blocks = (arrival.input_len + arrival.output_len) // self._block_size
        request.block_hashes = [b"%d:%d" % (place, block) for block in range(num_blocks)]
        try:
            self._scheduler.add(request)
        except AdmissionError as error:
            raise InputError(f"request {place} of the traffic: {error}") from None
        self._places[name] = place

    def _launch(self, batch: ScheduledBatch) -> None:
        num_tokens = tuple([part.num_tokens for part in batch.ranks])
        num_requests = tuple([part.num_requests for part in batch.ranks])
        shape = self._buckets.shape(
            max(num_tokens), max(num_requests), 1, "greedy", is_mixed=num_tokens != num_requests
        )
        self._now += self._device.host_seconds(sum(num_requests))
        took = self._device.device_seconds(shape, batch)
        self._free_from = max(self._free_from, self._now) + took
        self._record.busy += took
        self._in_flight.append((batch, shape, self._free_from))
        running = self._scheduler.rank_running
        self._record.steps.append(
            StepRecord(
                self._now,
                shape,
                num_tokens,
                num_requests,
                self._scheduler.num_waiting,
                running,
                tuple([pool.usage for pool in self._pools]),
            )
        )

    def _read_oldest(self) -> None:
        batch, shape, done = self._in_flight.popleft()
        self._now = max(self._now, done)
        if self._pace is not None:
            self._tell_pace(batch, shape, self._pace)
        updates = self._scheduler.update(batch, [_TOKEN] * batch.num_requests)
        places = self._places
        self._record.read.append(self._now)
        self._record.sampled.append([places[update.request_id] for update in updates])

    def _tell_pace(self, batch: ScheduledBatch, shape: StepShape, pace: Pace) -> None:
        if self._busy_since is not None:
            context = max([part.num_context for part in batch.ranks])
            pace.time.observe(shape.num_tokens, shape.program == "decode", context, self._now - self._busy_since)
        self._busy_since = self._now if self._in_flight else None
