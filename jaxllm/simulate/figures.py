"""What happened in a simulation -> its figures. Knows times and counts; simulates nothing, prints nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from jaxllm.simulate.simulator import Record, Setting, StepRecord

QUANTILES = (50, 90, 99)
_MOST_POINTS = 300  # of a curve over time


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of some times, in seconds; `ascending` has at most 201 of their quantiles, for a curve."""

    mean: float
    p50: float
    p90: float
    p99: float
    ascending: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """What a data rank did."""

    num_tokens: int  # computed for requests
    padding_share: float
    mean_running: float
    kv_usage_mean: float  # shares of the pool
    kv_usage_peak: float
    num_preemptions: int
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What went on over time, in the mean of equal parts of it; lists of ranks hold a list of parts for each."""

    times: tuple[float, ...]  # the middle of each part
    waiting: tuple[float, ...]
    running: tuple[float, ...]
    tokens_per_second: tuple[float, ...]  # output
    kv_usage: tuple[tuple[float, ...], ...]
    rank_tokens: tuple[tuple[float, ...], ...]  # of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a simulation came to. Times are seconds, shares from 0 to 1; means over time weigh steps by their length."""

    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    seconds: float  # from the first arrival to the last token
    device_busy_share: float
    ttft: Spread
    tpot: Spread  # of each request: the mean of its tokens after the first
    itl: Spread
    latency: Spread  # of whole requests
    num_steps: int
    num_scheduled_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_discarded_tokens: int
    num_padded_tokens: int
    mean_batch: float  # requests in a step, over all ranks
    mean_waiting: float
    peak_waiting: int
    num_kv_tokens: int  # that the pool of a rank holds
    ranks: tuple[RankFigures, ...]
    course: Course
    steps: tuple[StepRecord, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def requests_per_second(self) -> float:
        return self.num_requests / self.seconds

    @property
    def padding_share(self) -> float:
        return self.num_padded_tokens / max(self.num_padded_tokens + self.num_scheduled_tokens, 1)


def draw_figures(record: Record, setting: Setting) -> Figures:
    """Counts and averages what happened."""
    arrivals, steps = record.arrivals, record.steps
    arrived, read = np.array(record.arrived), np.array(record.read)
    counts = np.array([len(places) for places in record.sampled])
    places = np.fromiter(chain.from_iterable(record.sampled), np.int32, int(counts.sum()))
    order = np.argsort(places, kind="stable")  # the tokens of each request together, as they came
    owner, time = places[order], np.repeat(read, counts)[order]
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    ends = np.append(begins[1:], len(owner)) - 1
    num_tokens = ends - begins + 1
    gaps = np.delete(np.diff(time, prepend=0.0), begins)
    several = num_tokens > 1
    start = float(arrived.min())
    held = _time_held(steps, float(read[-1]))
    stats = record.rank_stats
    padded = np.array([step.shape.num_tokens for step in steps])[:, None] - _table(steps, lambda step: step.num_tokens)
    return Figures(
        num_requests=len(arrivals),
        num_input_tokens=sum([arrival.input_len for arrival in arrivals]),
        num_output_tokens=len(owner),
        seconds=float(read[-1]) - start,
        device_busy_share=record.busy / (float(read[-1]) - start),
        ttft=_spread(time[begins] - arrived),
        tpot=_spread((time[ends] - time[begins])[several] / (num_tokens[several] - 1)),
        itl=_spread(gaps),
        latency=_spread(time[ends] - arrived),
        num_steps=len(steps),
        num_scheduled_tokens=sum([rank.num_scheduled_tokens for rank in stats]),
        num_preemptions=sum([rank.num_preemptions for rank in stats]),
        num_recomputed_tokens=sum([rank.num_recomputed_tokens for rank in stats]),
        num_discarded_tokens=sum([rank.num_discarded_tokens for rank in stats]),
        num_padded_tokens=int(padded.sum()),
        mean_batch=float(_table(steps, lambda step: step.num_requests).sum()) / len(steps),
        mean_waiting=float(np.average([step.num_waiting for step in steps], weights=held)),
        peak_waiting=max([step.num_waiting for step in steps]),
        num_kv_tokens=(setting.num_blocks - 1) * setting.block_size // len(setting.windows),
        ranks=tuple(_ranks(record, padded, held)),
        course=_course(record, time, start, held),
        steps=tuple(steps),
    )


def _spread(times: np.ndarray) -> Spread:
    if not len(times):
        return Spread(0.0, 0.0, 0.0, 0.0)
    quantiles = np.percentile(times, QUANTILES)
    shown = np.quantile(times, np.linspace(0, 1, min(len(times), 201)))
    return Spread(float(times.mean()), *map(float, quantiles), ascending=tuple(shown.tolist()))


def _table(steps: Sequence[StepRecord], column: Callable[[StepRecord], tuple[float, ...]]) -> np.ndarray:
    """Steps x ranks."""
    return np.array([column(step) for step in steps])


def _time_held(steps: Sequence[StepRecord], end: float) -> np.ndarray:
    """For how long what was seen at each launch counts; a moment at least."""
    launched = np.array([step.launched for step in steps])
    return np.maximum(np.diff(launched, append=end), 1e-9)


def _ranks(record: Record, padded: np.ndarray, held: np.ndarray) -> list[RankFigures]:
    steps = record.steps
    usage, running = _table(steps, lambda step: step.kv_usage), _table(steps, lambda step: step.num_running)
    tokens = _table(steps, lambda step: step.num_tokens)
    return [
        RankFigures(
            num_tokens=int(tokens[:, rank].sum()),
            padding_share=float(padded[:, rank].sum() / max(padded[:, rank].sum() + tokens[:, rank].sum(), 1)),
            mean_running=float(np.average(running[:, rank], weights=held)),
            kv_usage_mean=float(np.average(usage[:, rank], weights=held)),
            kv_usage_peak=float(usage[:, rank].max()),
            num_preemptions=stats.num_preemptions,
            num_recomputed_tokens=stats.num_recomputed_tokens,
        )
        for rank, stats in enumerate(record.rank_stats)
    ]


def _course(record: Record, token_times: np.ndarray, start: float, held: np.ndarray) -> Course:
    """Means of equal parts of the time; a part without a launch goes on with what the last one saw."""
    steps, end = record.steps, record.read[-1]
    num_parts = min(_MOST_POINTS, max(len(steps) // 2, 1))
    edges = np.linspace(start, end, num_parts + 1)
    part = np.clip(np.searchsorted(edges, [step.launched for step in steps], side="right") - 1, 0, num_parts - 1)
    weights = np.bincount(part, held, num_parts)
    last = np.maximum.accumulate(np.where(weights > 0, np.arange(num_parts), part[0]))

    def mean(values: np.ndarray) -> tuple[float, ...]:
        means = np.bincount(part, held * values, num_parts) / np.maximum(weights, 1e-12)
        return tuple(means[last].tolist())

    def by_rank(column: Callable[[StepRecord], tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
        return tuple(mean(values) for values in _table(steps, column).T)

    running = _table(steps, lambda step: step.num_running).sum(axis=1)
    made = np.histogram(token_times, edges)[0] / np.maximum(np.diff(edges), 1e-12)
    return Course(
        times=tuple(((edges[1:] + edges[:-1]) / 2 - start).tolist()),
        waiting=mean(np.array([step.num_waiting for step in steps])),
        running=mean(running),
        tokens_per_second=tuple(made.tolist()),
        kv_usage=by_rank(lambda step: step.kv_usage),
        rank_tokens=by_rank(lambda step: step.num_tokens),
    )
