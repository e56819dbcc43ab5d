"""Records of requests -> figures. Knows times and counts; sends nothing, prints nothing."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.bench.serve_client import Record


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one kind, in seconds, in the order of the requests."""

    values: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.values.mean()) if len(self.values) else 0.0

    @property
    def std(self) -> float:
        return float(self.values.std()) if len(self.values) else 0.0

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.values, percent)) if len(self.values) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFigures:
    """What a run came to; `duration` is from its begin to the last piece of output."""

    num_requests: int
    num_good: int  # of those whole, the ones that met every target
    errors: Mapping[str, int]  # what went wrong, how often
    duration: float
    num_prompt_tokens: int
    num_output_tokens: int
    times: Mapping[str, Times]  # ttft, tpot, itl, e2el
    peak_tokens_per_second: float  # in a second of the run
    peak_concurrency: int
    lateness: float  # 99th percentile of how much later than planned this client sent, in seconds
    rate: float | None = None  # requests a second that were offered

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())

    @property
    def num_completed(self) -> int:
        return self.num_requests - self.num_failed

    @property
    def request_throughput(self) -> float:
        return self.num_completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.num_output_tokens / self.duration

    @property
    def total_throughput(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.duration

    @property
    def goodput(self) -> float:
        """Requests a second that met every target."""
        return self.num_good / self.duration

    @property
    def good_share(self) -> float:
        """The share of all requests, those that failed included, that met every target."""
        return self.num_good / max(self.num_requests, 1)


def draw_figures(
    records: Sequence[Record],
    targets: Mapping[str, float],
    rate: float | None = None,
    max_concurrency: int | None = None,
) -> ServeFigures:
    """Counts and averages; requests that failed are only counted, and their tokens are not."""
    whole = [record for record in records if record.error is None]
    first = np.array([record.times[0] - record.sent for record in whole])
    last = np.array([record.times[-1] - record.sent for record in whole])
    counts = np.array([record.num_output_tokens for record in whole], dtype=int)
    per_token = np.where(counts > 1, (last - first) / np.maximum(counts - 1, 1), 0.0)
    gaps = [np.diff(record.times) for record in whole if len(record.times) > 1]
    measured = {"ttft": first, "tpot": per_token, "e2el": last}
    good = np.ones(len(whole), dtype=bool)
    for name, target in targets.items():
        good &= measured[name] <= target
    duration = max([record.times[-1] for record in whole], default=0.0)
    # A request that waits for another to end is not late, it is held back; those of no rate come as they can.
    late = [] if max_concurrency or rate == math.inf else [record.sent - record.planned for record in records]
    return ServeFigures(
        num_requests=len(records),
        num_good=int(good.sum()),
        errors=Counter(record.error for record in records if record.error is not None),
        duration=max(duration, 1e-9),
        num_prompt_tokens=sum(record.num_prompt_tokens for record in whole),
        num_output_tokens=int(counts.sum()),
        times={
            "ttft": Times(first),
            "tpot": Times(per_token[counts > 1]),
            "itl": Times(np.concatenate(gaps) if gaps else np.array([])),
            "e2el": Times(last),
        },
        peak_tokens_per_second=max(tokens_by_second(whole), default=0.0),
        peak_concurrency=max(under_way(whole)[1], default=0),
        lateness=float(np.percentile(late, 99)) if late else 0.0,
        rate=rate,
    )


def tokens_by_second(records: Sequence[Record]) -> list[float]:
    """Gives the output tokens of each second of the run; a piece of several counts as equal parts of its request."""
    if not records:
        return []
    times = np.concatenate([record.times for record in records])
    weights = np.concatenate([np.full(len(r.times), r.num_output_tokens / len(r.times)) for r in records])
    return np.bincount(times.astype(int), weights).tolist()


def under_way(records: Sequence[Record]) -> tuple[list[float], list[int]]:
    """Gives the moments at which a request was sent or ended, and how many were under way from each on."""
    moments = [(record.sent, 1) for record in records] + [(record.times[-1], -1) for record in records]
    moments.sort()
    return [moment for moment, _ in moments], np.cumsum([change for _, change in moments]).tolist()
