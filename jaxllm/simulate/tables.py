"""Figures -> tables for people and JSON for programs. Knows names and units; decides nothing."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm.mesh.planner import MeshShape
from jaxllm.planning.tables import print_table
from jaxllm.simulate.call import Subject
from jaxllm.simulate.figures import Figures, Spread
from jaxllm.simulate.sweep import Trial

TIMES = ("ms", "mean", "p50", "p90", "p99")
RANKS = ("data rank", "tokens", "padding", "running", "KV mean", "KV peak", "preemptions", "recomputed")
TRIALS = (
    "shape",
    "max-num-seqs",
    "tokens",
    "out tok/s",
    "TPOT ms",
    "p99",
    "TTFT ms",
    "p99",
    "waiting",
    "preemptions",
    "",
)


def facts(subject: Subject, mesh: MeshShape | None = None) -> Iterator[tuple[str, str]]:
    """Yields labels and values of what was simulated."""
    measured = "" if subject.device.measured else " (not measured: data sheet times efficiency)"
    yield "model", subject.shape.name
    yield "devices", f"{subject.num_devices} x {subject.device.name}{measured}{f', {mesh}' if mesh else ''}"


def rows(f: Figures) -> Iterator[tuple[str, str]]:
    """Yields labels and values of a simulation's figures but for times and ranks."""
    total = (f.num_input_tokens + f.num_output_tokens) / f.seconds
    asked = f"{f.num_requests:,} requests, {f.num_input_tokens:,} tokens in, {f.num_output_tokens:,} out"
    yield "traffic", f"{asked}, in {f.seconds:,.2f} s"
    speed = f"{f.tokens_per_second:,.0f} output tokens/s, {total:,.0f} in all"
    yield "throughput", f"{speed}, {f.requests_per_second:,.2f} requests/s"
    yield (
        "steps",
        f"{f.num_steps:,} of {f.mean_batch:,.1f} requests; devices busy {f.device_busy_share:.0%} of the time",
    )
    yield "padding", f"{f.padding_share:.1%} of {f.num_scheduled_tokens + f.num_padded_tokens:,} tokens"
    yield "queue", f"{f.mean_waiting:,.1f} waiting in the mean, {f.peak_waiting:,} at most"
    lost = f"{f.num_preemptions:,}, {f.num_recomputed_tokens:,} tokens computed again"
    yield "preemptions", f"{lost}; a pool holds {f.num_kv_tokens:,} tokens"


def print_figures(figures: Figures) -> None:
    """Prints a simulation's figures, a table of times and one of data ranks."""
    for label, value in rows(figures):
        print(f"{label:18}{value}")
    print_table("times", TIMES, list(time_rows(figures)))
    print_table("data ranks", RANKS, list(rank_rows(figures)))


def time_rows(f: Figures) -> Iterator[list[str]]:
    """Yields the rows of the table of times."""
    for name, spread in (("TTFT", f.ttft), ("TPOT", f.tpot), ("ITL", f.itl), ("whole request", f.latency)):
        yield [name, *(f"{1e3 * t:,.2f}" for t in (spread.mean, spread.p50, spread.p90, spread.p99))]


def rank_rows(f: Figures) -> Iterator[list[str]]:
    """Yields the rows of the table of data ranks."""
    for rank, r in enumerate(f.ranks):
        shares = [
            f"{r.padding_share:.1%}",
            f"{r.mean_running:,.1f}",
            f"{r.kv_usage_mean:.1%}",
            f"{r.kv_usage_peak:.1%}",
        ]
        yield [str(rank), f"{r.num_tokens:,}", *shares, f"{r.num_preemptions:,}", f"{r.num_recomputed_tokens:,}"]


def print_sweep(trials: Sequence[Trial]) -> None:
    """Prints a table of all settings that ran, and once each why others did not."""
    print_table("every setting, limits of each copy", TRIALS, list(trial_rows(trials)))
    for reason in dict.fromkeys(trial.reason for trial in trials if trial.reason):
        print(f"{', '.join(str(t.mesh) for t in trials if t.reason == reason)}: {reason}")


def trial_rows(trials: Sequence[Trial]) -> Iterator[list[str]]:
    """Yields the rows of a sweep's table."""
    for t in trials:
        if (f := t.figures) is not None:
            times = [f"{1e3 * s:,.2f}" for s in (f.tpot.mean, f.tpot.p99, f.ttft.mean, f.ttft.p99)]
            counts = [f"{f.mean_waiting:,.1f}", f"{f.num_preemptions:,}", "Pareto front" if t.is_on_front else ""]
            limits = [str(t.max_num_seqs), str(t.max_num_batched_tokens)]
            yield [str(t.mesh), *limits, f"{f.tokens_per_second:,.0f}", *times, *counts]


def as_json(subject: Subject, mesh: MeshShape, figures: Figures) -> dict[str, Any]:
    """Gives a simulation as plain data; times in seconds."""
    return _head(subject) | {"mesh": _mesh(mesh), **figures_json(figures)}


def sweep_json(subject: Subject, trials: Sequence[Trial]) -> dict[str, Any]:
    """Gives a sweep as plain data, without what went on over time."""
    return _head(subject) | {"settings": [_trial_json(trial) for trial in trials]}


def figures_json(figures: Figures) -> dict[str, Any]:
    """Gives figures as plain data, those that follow from others too."""
    said: dict[str, Any] = {
        "output_tokens_per_second": figures.tokens_per_second,
        "requests_per_second": figures.requests_per_second,
        "padding_share": figures.padding_share,
    }
    for field in dataclasses.fields(figures):
        value = getattr(figures, field.name)
        if isinstance(value, Spread):
            said[field.name] = {name: getattr(value, name) for name in ("mean", "p50", "p90", "p99")}
        elif field.name == "ranks":
            said["ranks"] = [dataclasses.asdict(rank) for rank in value]
        elif field.name == "course":
            said["course"] = dataclasses.asdict(value)
        elif field.name != "steps":
            said[field.name] = value
    return said


def _head(subject: Subject) -> dict[str, Any]:
    return {
        "model": subject.shape.name,
        "device": subject.device.as_json(),
        "num_devices": subject.num_devices,
    }


def _mesh(mesh: MeshShape) -> dict[str, int]:
    return {"data": mesh.data, "tensor": mesh.tensor}


def _trial_json(trial: Trial) -> dict[str, Any]:
    said: dict[str, Any] = {
        "mesh": _mesh(trial.mesh),
        "max_num_seqs": trial.max_num_seqs,
        "max_num_batched_tokens": trial.max_num_batched_tokens,
        "is_on_front": trial.is_on_front,
        "reason": trial.reason or None,
    }
    if trial.figures is not None:
        said |= figures_json(trial.figures)
        del said["course"]
    return said
