"""A profile -> tables for people and plain data for programs. Knows units and columns; measures nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.bench.kernel_groups import titles
from jaxllm.bench.report import table_lines
from jaxllm.bench.step_profile import Profile, StepKind, Tally

_TOP_KERNELS, _TOP_CALLS, _TOP_OTHERS, _NAME = 15, 16, 8, 56


def profile_lines(title: str, profile: Profile, num_layers: int, num_kinds: int | None = None) -> list[str]:
    """Gives the tables of the kinds of steps that took longest, or of all."""
    kinds = sorted(profile.kinds.items(), key=lambda item: -item[1].wall)
    shown = kinds[:num_kinds]
    lines = [f"## {title}", "", about(profile)]
    for name, kind in shown:
        lines += ["", *_device_lines(name, kind, num_layers), "", *_host_lines(name, kind)]
    left = [f"{name} ({kind.num_steps} steps, {kind.wall / 1e6:,.1f} ms)" for name, kind in kinds[len(shown) :]]
    return [*lines, *(["", f"not shown: {', '.join(left)}"] if left else [])]


def about(profile: Profile) -> str:
    """Says how the kernels came to run."""
    if profile.device == "CPU":
        return "CPU: XLA's operations stand for kernels; those of several threads overlap"
    share = profile.num_in_graphs / max(profile.num_kernels, 1)
    how = "ON" if share > 0.5 else "OFF"
    return (
        f"{profile.device}, command buffers {how}: {share:.0%} of {profile.num_kernels:,} kernels came out of CUDA "
        f"graphs; {profile.num_unplaced:,} could not be told to a step. Host times are those under the profiler."
    )


def as_json(profile: Profile, num_layers: int) -> dict[str, Any]:
    """Gives a profile as plain data, times in microseconds a step."""
    return {
        "device": profile.device,
        "num_layers": num_layers,
        "num_kernels": profile.num_kernels,
        "num_in_graphs": profile.num_in_graphs,
        "num_unplaced": profile.num_unplaced,
        "kinds": {name: _kind_as_json(kind) for name, kind in profile.kinds.items()},
    }


def _kind_as_json(kind: StepKind) -> dict[str, Any]:
    n = max(kind.num_steps, 1)
    return {
        "num_steps": kind.num_steps,
        "wall_us": kind.wall / n / 1e3,
        "gap_inside_us": kind.gap_inside / n / 1e3,
        "gap_before_us": kind.gap_before / n / 1e3,
        "groups": {name: _tally_as_json(tally, n) for name, tally in kind.groups.items()},
        "kernels": [
            {"group": group, "name": name} | _tally_as_json(tally, n)
            for (group, name), tally in _by_total(kind.kernels)[:60]
        ],
        "phases": {name: _tally_as_json(tally, n) for name, tally in kind.phases.items()},
        "calls": {name: _tally_as_json(tally, n) for name, tally in _by_own(kind.calls)[:80]},
        "other_threads": {name: _tally_as_json(tally, n) for name, tally in _by_own(kind.others)[:40]},
    }


def _tally_as_json(tally: Tally, num_steps: int) -> dict[str, float]:
    return {
        "count": tally.count / num_steps,
        "busy_us": tally.busy / num_steps / 1e3,
        "total_us": tally.total / num_steps / 1e3,
    }


def _device_lines(name: str, kind: StepKind, num_layers: int) -> list[str]:
    n, wall = max(kind.num_steps, 1), max(kind.wall, 1.0)

    def row(title: str, time: float, count: float | None = None) -> list[str]:
        per_layer = "" if count is None else f"{count / num_layers:.1f}"
        return [
            title,
            f"{time / n / 1e3:,.1f}",
            f"{time / wall:.1%}",
            "" if count is None else f"{count:,.1f}",
            per_layer,
        ]

    rows = [row(t, kind.groups[t].busy, kind.groups[t].count / n) for t in titles() if t in kind.groups]
    rows.sort(key=lambda cells: -float(cells[1].replace(",", "")))
    rows += [
        row("gaps inside steps", kind.gap_inside),
        row("gaps between steps", kind.gap_before),
        row("step", kind.wall, sum(tally.count for tally in kind.groups.values()) / n),
    ]
    lines = [f"### {name}: {kind.num_steps} steps", ""]
    lines += table_lines(["device", "us a step", "share", "kernels", "per layer"], rows, left=1)
    overlap = sum(tally.total - tally.busy for tally in kind.groups.values())
    if overlap > 0.01 * wall:
        lines.append(f"kernels overlapped for {overlap / n / 1e3:,.1f} us a step, counted once above")
    kernels = [
        [key[1][:_NAME], key[0], f"{tally.total / n / 1e3:,.1f}", f"{tally.count / n:,.1f}"]
        for key, tally in _by_total(kind.kernels)[:_TOP_KERNELS]
    ]
    return [*lines, "", *table_lines(["kernel", "group", "us a step", "calls"], kernels, left=2)]


def _host_lines(name: str, kind: StepKind) -> list[str]:
    n = max(kind.num_steps, 1)
    if not kind.phases:
        return []
    phases = ", ".join(f"{phase} {tally.total / n / 1e3:,.0f}" for phase, tally in kind.phases.items())
    lines = [f"host, us a step: {phases}", ""]

    def rows(tallies: Mapping[str, Tally], where: str, count: int) -> list[list[str]]:
        return [
            [call[:_NAME], where, f"{t.count / n:,.1f}", f"{t.busy / n / 1e3:,.1f}", f"{t.total / n / 1e3:,.1f}"]
            for call, t in _by_own(tallies)[:count]
        ]

    header = ["host call", "where", "calls", "own us a step", "total us a step"]
    listed = rows(kind.calls, "execute", _TOP_CALLS) + rows(kind.others, "other threads", _TOP_OTHERS)
    return [*lines, *table_lines(header, listed, left=2)]


def _by_total[K](tallies: Mapping[K, Tally]) -> list[tuple[K, Tally]]:
    return sorted(tallies.items(), key=lambda item: -item[1].total)


def _by_own(tallies: Mapping[str, Tally]) -> Sequence[tuple[str, Tally]]:
    return sorted(tallies.items(), key=lambda item: -item[1].busy)
