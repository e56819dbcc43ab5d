"""What a run gave -> figures. Knows times and counts; no engine, no printing."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.bench.workloads import WorkloadRequest, digest

SHOWN_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """How the engine's steps went; times in milliseconds a step, shares from 0 to 1.

    `schedule`, `build`, `execute` and `update` are the host's work, `wait` is what it was blocked on the device.
    """

    num_steps: int
    mean_batch: float  # requests in a step
    kv_utilisation: float  # share of the lent KV slots that held a token, mean over sampled steps
    kv_usage_peak: float  # largest share of the pool that was lent, of the same steps
    padding_share: float  # of the computed tokens, those that only filled a compiled shape
    num_recomputed_tokens: int
    num_discarded_tokens: int
    num_preemptions: int
    schedule_ms: float
    build_ms: float
    execute_ms: float
    update_ms: float
    wait_ms: float

    @property
    def host_ms(self) -> float:
        return self.schedule_ms + self.build_ms + self.execute_ms + self.update_ms


@dataclass(frozen=True, slots=True)
class Run:
    """What came of requests that were sent at once: tokens, and their times in seconds since each request's arrival."""

    seconds: float
    outputs: list[list[int]]
    token_times: list[list[float]] = field(default_factory=list)  # empty where they cannot be told
    steps: StepFigures | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and percentiles, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        """Summarises seconds; None where there are none."""
        if not seconds:
            return None
        p50, p90, p99 = (1e3 * float(value) for value in np.percentile(seconds, SHOWN_PERCENTILES))
        return cls(1e3 * float(np.mean(seconds)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Times of requests: to the first token, per token after it, between tokens, and to the end."""

    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None

    @classmethod
    def of(cls, token_times: Sequence[Sequence[float]]) -> "Latencies":
        """Summarises the times at which each request's tokens came."""
        timed = [times for times in token_times if times]
        return cls(
            ttft=Spread.of([times[0] for times in timed]),
            tpot=Spread.of([(times[-1] - times[0]) / (len(times) - 1) for times in timed if len(times) > 1]),
            itl=Spread.of(np.concatenate([np.diff(times) for times in timed]).tolist() if timed else []),
            e2e=Spread.of([times[-1] for times in timed]),
        )

    def rows(self) -> list[tuple[str, Spread]]:
        """Names with their spreads, those that could be measured."""
        named = (("TTFT", self.ttft), ("TPOT", self.tpot), ("ITL", self.itl), ("E2E", self.e2e))
        return [(name, spread) for name, spread in named if spread is not None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One engine on one list of requests."""

    engine: str
    workload: str
    digest: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    warm_up_seconds: float
    latencies: Latencies
    steps: StepFigures | None
    output_digest: str
    detail: dict[str, Any]  # tokens and their times
    iteration_seconds: tuple[float, ...] = ()  # of `bench latency`

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds


def measured(
    engine: str, workload: str, fingerprint: str, requests: Sequence[WorkloadRequest], run: Run, warm_up_seconds: float
) -> Measurement:
    """Draws the figures from a run."""
    return Measurement(
        engine=engine,
        workload=workload,
        digest=fingerprint,
        num_requests=len(requests),
        num_prompt_tokens=sum(len(request.prompt) for request in requests),
        num_output_tokens=sum(len(tokens) for tokens in run.outputs),
        seconds=run.seconds,
        warm_up_seconds=warm_up_seconds,
        latencies=Latencies.of(run.token_times),
        steps=run.steps,
        output_digest=output_digest(run.outputs),
        detail={"outputs": run.outputs, "token_times": run.token_times},
    )


def merged(
    engine: str, workload: str, batches: Sequence[Sequence[WorkloadRequest]], runs: Sequence[Run], warm_up: float
) -> Measurement:
    """Draws the figures from runs of several batches of the same lengths; the digest is the first one's."""
    whole = Run(
        seconds=sum(run.seconds for run in runs),
        outputs=[tokens for run in runs for tokens in run.outputs],
        token_times=[times for run in runs for times in run.token_times],
        steps=mean_steps([run.steps for run in runs if run.steps is not None]),
    )
    requests = [request for batch in batches for request in batch]
    measurement = measured(engine, workload, digest(batches[0]), requests, whole, warm_up)
    return dataclasses.replace(measurement, iteration_seconds=tuple(run.seconds for run in runs))


def mean_steps(each: Sequence[StepFigures]) -> StepFigures | None:
    """Sums the counts of several runs and takes the means of the rest, each run weighed by its steps."""
    if not each:
        return None
    values: dict[str, Any] = {}
    for f in dataclasses.fields(StepFigures):
        column = [getattr(figures, f.name) for figures in each]
        if f.name.startswith("num_"):
            values[f.name] = sum(column)
        elif f.name == "kv_usage_peak":
            values[f.name] = max(column)
        else:
            values[f.name] = float(np.average(column, weights=[figures.num_steps for figures in each]))
    return StepFigures(**values)


def output_digest(outputs: Sequence[Sequence[int]]) -> str:
    """A short fingerprint of what was generated."""
    h = hashlib.sha256()
    for tokens in outputs:
        h.update(np.asarray([*tokens, -1], dtype=np.int32).tobytes())
    return h.hexdigest()[:16]


def agreement(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> tuple[int, float]:
    """Counts the requests with the same tokens, and gives the mean share of tokens before the first difference."""
    shares = []
    for mine, theirs in zip(first, second, strict=True):
        same = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )
        shares.append(same / max(len(mine), len(theirs), 1))
    return sum(share == 1.0 for share in shares), float(np.mean(shares)) if shares else 0.0
