"""A plan -> tables for people and JSON for programs. Knows names and units; decides nothing."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxllm.mesh.planner import Candidate, Plan, Point, gb

_PARTS = ("weights", "kv", "compute", "kernels", "all_reduce_latency", "all_reduce_bytes", "bubble", "host")


def print_plan(plan: Plan) -> None:
    """Prints what was asked, a table of what fits, one of times, what cannot be, warnings, and what to take."""
    for label, value in facts(plan):
        print(f"{label:18}{value}")
    fitting = [c for c in plan.candidates if c.operating is not None]
    if fitting:
        print_table(f"memory of a device, KV of a copy ({plan.traffic.longest:,} tokens a request)", _MEMORY, [
            _memory_row(c) for c in fitting
        ])  # fmt: skip
        print_table("a step at the batch of a copy, ms", _TIMES, [_time_row(c) for c in fitting])
        print_table("what comes of it", _SPEEDS, [_speed_row(plan, c) for c in fitting])
    for c in plan.candidates:
        if c.reason:
            print(f"{c.mesh}: {c.reason}")
    for warning, meshes in warnings(plan).items():
        print(f"warning, {'; '.join(meshes)}: {warning}")
    print()
    for label, value in verdict(plan):
        print(f"{label:18}{value}")


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields labels and values of what was asked."""
    t, d = plan.traffic, plan.device
    yield "model", plan.shape.name
    yield (
        "devices",
        f"{plan.num_devices} x {d.name}{'' if d.measured else ' (not measured: data sheet times efficiency)'}",
    )
    rate = "as many as can be" if t.request_rate is None else f"{t.request_rate:g} requests/s"
    yield "traffic", f"{t.input_len:,.0f} tokens in, {t.output_len:,.0f} out, {rate}"
    targets = [
        f"{name} {value * 1e3:g} ms" for name, value in (("TTFT", t.ttft), ("TPOT", t.tpot)) if value is not None
    ]
    yield "targets", ", ".join(targets) or "none"


def warnings(plan: Plan) -> dict[str, list[str]]:
    """Gives each warning once, with the shapes that it is about."""
    found: dict[str, list[str]] = {}
    for candidate in plan.candidates:
        for warning in candidate.warnings:
            found.setdefault(warning, []).append(str(candidate.mesh))
    return found


def verdict(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields what to take, and why."""
    for label, best in (("for throughput", plan.for_throughput), ("for latency", plan.for_latency)):
        if best is not None and best.settings is not None:
            yield label, f"{best.mesh}: {flags(best)}"
    yield "why", plan.why


def flags(candidate: Candidate) -> str:
    """Spells a shape and its settings as flags of `jaxllm serve`."""
    s, mesh = candidate.settings, candidate.mesh
    assert s is not None
    said = f"--data-parallel-size {mesh.data} --tensor-parallel-size {mesh.tensor}"
    said += f" --pipeline-parallel-size {mesh.pipe}" if mesh.pipe > 1 else ""
    return (
        f"{said} --max-num-seqs {s.max_num_seqs} --max-num-batched-tokens {s.max_num_batched_tokens} "
        f"--block-size {s.block_size}"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Gives the plan as plain data; seconds and bytes."""
    t, limits = plan.traffic, plan.limits
    return {
        "model": plan.shape.name,
        "device": plan.device.as_json(),
        "num_devices": plan.num_devices,
        "traffic": {
            "input_len": t.input_len,
            "output_len": t.output_len,
            "request_rate": t.request_rate,
            "ttft_target": t.ttft,
            "tpot_target": t.tpot,
        },
        "limits": {
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.token_budget,
            "block_size": limits.block_size,
            "gpu_memory_utilization": limits.memory_share,
        },
        "shapes": [_candidate_json(c) for c in plan.candidates],
        "for_throughput": _mesh_json(plan.for_throughput),
        "for_latency": _mesh_json(plan.for_latency),
        "why": plan.why,
    }


def _candidate_json(c: Candidate) -> dict[str, Any]:
    said: dict[str, Any] = {"mesh": _mesh_json(c), "reason": c.reason or None}
    if c.memory is not None:
        m = c.memory
        said["memory"] = {
            "weights": m.weights,
            "temporaries": m.temporaries,
            "kv_pool": m.pool,
            "num_blocks": m.num_blocks,
            "kv_tokens": m.num_tokens,
            "largest_batch": m.largest_batch,
        }
    if c.operating is None or c.most is None or c.alone is None or c.settings is None:
        return said
    return said | {
        "operating": _point_json(c.operating),
        "most": _point_json(c.most),
        "alone": _point_json(c.alone),
        "curve": [_point_json(p) for p in c.curve],
        "keeps_targets": c.keeps_targets,
        "carries_rate": c.carries_rate,
        "settings": {
            "max_num_seqs": c.settings.max_num_seqs,
            "max_num_batched_tokens": c.settings.max_num_batched_tokens,
            "block_size": c.settings.block_size,
        },
        "warnings": list(c.warnings),
    }


def _mesh_json(c: Candidate | None) -> dict[str, int] | None:
    return None if c is None else {"data": c.mesh.data, "tensor": c.mesh.tensor, "pipe": c.mesh.pipe}


def _point_json(p: Point) -> dict[str, Any]:
    return {
        "batch": p.batch,
        "step": p.step.total,
        "step_parts": p.step.parts(),
        "ttft": p.ttft,
        "tpot": p.tpot,
        "output_tokens_per_second": p.tokens_per_second,
        "output_tokens_per_second_per_device": p.tokens_per_device,
        "requests_per_second": p.requests_per_second,
    }


_MEMORY = ("shape", "weights", "KV pool", "temporaries", "KV tokens", "largest batch")
_TIMES = (
    "shape",
    "batch",
    "step",
    "weights",
    "KV",
    "compute",
    "launches",
    "all-reduce latency",
    "bytes",
    "bubble",
    "host",
)
_SPEEDS = ("shape", "batch", "TTFT ms", "TPOT ms", "out tok/s", "per device", "requests/s", "at most", "")


def _memory_row(c: Candidate) -> list[str]:
    m = c.memory
    assert m is not None
    return [str(c.mesh), gb(m.weights), gb(m.pool), gb(m.temporaries), f"{m.num_tokens:,}", f"{m.largest_batch:,}"]


def _time_row(c: Candidate) -> list[str]:
    assert c.operating is not None
    parts = c.operating.step.parts()
    shown = [c.operating.step.total, *(parts[name] for name in _PARTS)]
    return [str(c.mesh), str(c.operating.batch), *(f"{seconds * 1e3:.2f}" for seconds in shown)]


def _speed_row(plan: Plan, c: Candidate) -> list[str]:
    p, most = c.operating, c.most
    assert p is not None
    assert most is not None
    marks = [] if c.keeps_targets else ["misses the targets"]
    marks += [] if c.carries_rate else ["too slow for the rate"]
    if plan.for_throughput is c:
        marks.append("best throughput")
    if plan.for_latency is c:
        marks.append("best latency")
    speeds = (p.tokens_per_second, p.tokens_per_device)
    times = [f"{p.ttft * 1e3:,.0f}", f"{p.tpot * 1e3:.2f}"]
    return [
        str(c.mesh),
        str(p.batch),
        *times,
        *(f"{s:,.0f}" for s in speeds),
        _short(p.requests_per_second),
        _short(most.requests_per_second),
        ", ".join(marks),
    ]


def _short(rate: float) -> str:
    digits = 2 if rate <= 0 else max(0, 2 - math.floor(math.log10(rate)))
    return f"{rate:,.{min(digits, 3)}f}"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column is text, as are those without a name; the others are numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 or not name else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has no width
        console = Console(highlight=False, width=200)
    console.print(table)
