"""A grid of steps, run and timed one by one. Knows the engine's builder and runner; fits nothing.

Requests are made up: each has a row, tokens and blocks, which several may share, since what is in them does not matter.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.buckets import Buckets, StepShape
from jaxllm.engine.build import BuiltEngine
from jaxllm.engine.input_builder import InputBuilder
from jaxllm.mesh.cost_model import StepLoad
from jaxllm.scheduler.batch import RankBatch, Scheduled, ScheduledBatch
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.simulate.device import load_of


class Case(NamedTuple):
    """A step to run: `num_requests` times `num_tokens` behind `start` tokens of context."""

    num_requests: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A step that ran: its padded shape, what the cost model takes it for, and the seconds it took."""

    case: Case
    shape: StepShape
    load: StepLoad
    seconds: float
    build_seconds: float  # of the host, for its inputs


def grid(buckets: Buckets, max_context: int) -> list[Case]:
    """Lists decode steps of every size, and prompts that fill every size of mixed steps, each with several contexts."""
    contexts = sorted({min(64, max_context), max(max_context // 8, 1), max_context})
    cases = [Case(size, context - 1, 1) for size in buckets.decode for context in contexts]
    for tokens in buckets.mixed_tokens:
        for requests in sorted({1, *buckets.mixed_requests}):
            each = tokens // requests
            if 1 < each <= max_context:
                starts = {0, max_context - each} if requests == 1 else {0}
                cases += [Case(requests, start, each) for start in sorted(starts)]
    return cases


def time_steps(
    built: BuiltEngine,
    builder: InputBuilder,
    block_size: int,
    cases: Sequence[Case],
    repeats: int,
    progress: Callable[[Timed], None],
) -> list[Timed]:
    """Runs each step, once without the clock; the median of the others counts."""
    timed, numbers = [], count()
    for case in cases:
        batch = _batch(case, built, block_size, numbers)
        shape = builder.build(batch).shape
        _run(built, builder, batch)
        times = [_run(built, builder, batch) for _ in range(repeats)]
        host, took = (statistics.median(column) for column in zip(*times, strict=True))
        load = load_of(shape, batch.ranks[0])
        timed.append(Timed(case=case, shape=shape, load=load, seconds=took, build_seconds=host))
        progress(timed[-1])
    return timed


def _run(built: BuiltEngine, builder: InputBuilder, batch: ScheduledBatch) -> tuple[float, float]:
    """Gives the seconds that building the inputs takes, and those until the tokens are there."""
    start = time.perf_counter()
    inputs = builder.build(batch)
    launched = time.perf_counter()
    built.runner.execute(inputs).read()
    return launched - start, time.perf_counter() - launched


def _batch(case: Case, built: BuiltEngine, block_size: int, numbers: "count[int]") -> ScheduledBatch:
    num_tokens, num_blocks = case.start + case.num_tokens, built.memory.num_blocks - 1
    needed, groups = -(-num_tokens // block_size), len(built.model.kv_layout.windows)
    items, params = [], SamplingParams(temperature=0.0, max_tokens=1)
    for row in range(case.num_requests):
        prompt = [3 + (row + i) % (built.model.vocab_size - 3) for i in range(num_tokens)]
        request = Request(f"calibrate-{next(numbers)}", prompt, 1, params=params)
        request.row, request.data_rank, request.status = row, 0, RequestStatus.RUNNING
        request.block_tables = [[1 + (row * needed + i) % num_blocks for i in range(needed)] for _ in range(groups)]
        items.append(Scheduled(request, row, case.start, case.num_tokens, True))
    return ScheduledBatch((RankBatch(tuple(items), admitted=tuple(item.request for item in items)),), 1)
