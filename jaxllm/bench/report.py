"""Figures -> tables for people and JSON for programs. Knows their names and units; measures nothing."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bench.figures import Measurement
from jaxllm.config.errors import InputError

_VLLM_PERCENTILES = (10, 25, 50, 75, 90, 99)


def tell(line: str) -> None:
    """Prints a line of progress, beside the tables and not among them."""
    print(line, file=sys.stderr, flush=True)


def print_facts(facts: Mapping[str, Any]) -> None:
    """Prints what was measured and on what."""
    for name, value in facts.items():
        lines = [f"{key}: {part}" for key, part in value.items()] if isinstance(value, Mapping) else [value]
        for line in lines:
            print(f"{name.replace('_', ' '):18}{line}", flush=True)


def print_tables(measurements: Sequence[Measurement]) -> None:
    """Prints three tables: speeds, latencies, steps."""
    print()
    print_table(["workload", "engine", "digest", "requests", "seconds", "out tok/s", "total tok/s"], [
        [
            m.workload,
            m.engine,
            m.digest,
            f"{m.num_requests:,}",
            f"{m.seconds:.2f}",
            f"{m.output_tokens_per_second:,.1f}",
            f"{m.total_tokens_per_second:,.1f}",
        ]
        for m in measurements
    ])  # fmt: skip
    rows = [
        [m.workload, m.engine, name, *(f"{value:,.3f}" for value in dataclasses.astuple(spread))]
        for m in measurements
        for name, spread in m.latencies.rows()
    ]
    rows += [
        [m.workload, m.engine, "batch", *(f"{value:,.3f}" for value in _iteration_spread(m))]
        for m in measurements
        if m.iteration_seconds
    ]
    if rows:
        print()
        print_table(["workload", "engine", "ms", "mean", "p50", "p90", "p99"], rows)
    steps = [m for m in measurements if m.steps is not None]
    if steps:
        print()
        print_table(_STEP_HEADER, [_step_row(m) for m in steps])


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table that Markdown reads too."""
    for line in table_lines(header, rows):
        print(line, flush=True)


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Gives the lines of a table that Markdown reads too; the first `left` columns are texts, the others numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rule = [":" + "-" * (w - 1) if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def aligned(row: Sequence[str]) -> list[str]:
        return [
            cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]

    return ["| " + " | ".join(aligned(row)) + " |" for row in (header, rule, *rows)]


def as_json(measurement: Measurement, detailed: bool) -> dict[str, Any]:
    """Gives a measurement as plain data, with vLLM's names where its `bench` writes the same figure."""
    m = measurement
    plain = dataclasses.asdict(m)
    detail, iterations = plain.pop("detail"), plain.pop("iteration_seconds")
    plain["latencies_ms"] = plain.pop("latencies")
    if m.steps is not None:
        plain["steps"]["host_ms"] = m.steps.host_ms
    plain |= {
        "elapsed_time": plain.pop("seconds"),
        "total_num_tokens": m.num_prompt_tokens + m.num_output_tokens,
        "requests_per_second": m.num_requests / m.seconds,
        "tokens_per_second": m.total_tokens_per_second,
        "output_tokens_per_second": m.output_tokens_per_second,
    }
    if iterations:
        percentiles = np.percentile(iterations, _VLLM_PERCENTILES)
        plain |= {
            "avg_latency": float(np.mean(iterations)),
            "latencies": list(iterations),
            "percentiles": {str(p): float(v) for p, v in zip(_VLLM_PERCENTILES, percentiles, strict=True)},
        }
    return plain | (detail if detailed else {})


def check_folder(name: str, path: str | None) -> None:
    """Refuses a folder that could not be made, before anything is measured.

    Raises:
        InputError: a file stands where it, or a folder above it, should be.
    """
    folder = None if path is None else Path(path).expanduser()
    while folder is not None and not folder.is_dir():
        if folder.exists():
            raise InputError(f"{name}={path!r} cannot be made: {folder} is a file")
        folder = folder.parent


def write_json(path: str | None, content: Mapping[str, Any]) -> None:
    """Writes what was measured, if the user named a file."""
    if path is not None:
        Path(path).expanduser().write_text(json.dumps(content, indent=2) + "\n")
        tell(f"wrote {path}")


def _iteration_spread(m: Measurement) -> list[float]:
    milliseconds = [1e3 * seconds for seconds in m.iteration_seconds]
    return [float(np.mean(milliseconds)), *(float(value) for value in np.percentile(milliseconds, (50, 90, 99)))]


_STEP_HEADER = [
    *("workload", "steps", "mean batch", "KV filled", "KV peak", "padding", "recomputed", "discarded", "preempted"),
    *("host ms", "schedule", "build", "execute", "update", "wait ms"),
]


def _step_row(m: Measurement) -> list[str]:
    s = m.steps
    assert s is not None
    shares = (s.kv_utilisation, s.kv_usage_peak, s.padding_share)
    times = (s.host_ms, s.schedule_ms, s.build_ms, s.execute_ms, s.update_ms, s.wait_ms)
    counts = (s.num_recomputed_tokens, s.num_discarded_tokens, s.num_preemptions)
    return [
        m.workload,
        f"{s.num_steps:,}",
        f"{s.mean_batch:.1f}",
        *(f"{share:.1%}" for share in shares),
        *(f"{count:,}" for count in counts),
        *(f"{time:.3f}" for time in times),
    ]
