"""`--profile`: traces some steps of each measured workload and tabulates them. Knows the order only.

Windows of steps are traced, not whole runs: one at the start, where prompts are computed, and one in the middle.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.bench.figures import Measurement, StepFigures
from jaxllm.bench.kernel_groups import Frames, frames_of
from jaxllm.bench.own_engine import OwnEngine
from jaxllm.bench.profile_report import as_json, profile_lines
from jaxllm.bench.report import tell
from jaxllm.bench.step_profile import Profile, add_trace
from jaxllm.bench.trace import Trace, read_trace
from jaxllm.bench.workloads import WorkloadRequest

_SHOWN_KINDS = 2


class Profiler:
    """Profiles workloads on an engine, one after the other, into one folder."""

    def __init__(self, directory: str, num_steps: int, facts: Mapping[str, Any]):
        self._directory = Path(directory).expanduser()
        self._num_steps = num_steps
        self._facts = facts
        self._reports: dict[str, dict] = {}
        self._lines: list[str] = []

    def profile(self, subject: OwnEngine, requests: Sequence[WorkloadRequest], measurement: Measurement) -> None:
        """Runs the requests once more under the profiler; prints and writes the tables."""
        name = measurement.workload
        assert measurement.steps is not None
        middle = measurement.steps.num_steps // (2 * max(len(measurement.iteration_seconds), 1))
        starts = [0, middle] if middle >= self._num_steps else [0]
        folder = self._directory / "traces"
        windows = {start: folder / f"{name}-step-{start}" for start in starts}
        tell(f"{name}: tracing {self._num_steps} steps from {' and '.join(map(str, starts))}")
        subject.trace(requests, windows, self._num_steps)
        traces = [read_trace(window) for window in windows.values()]
        profile, frames = Profile(), _frames(subject, traces)
        for trace in traces:
            add_trace(profile, trace, frames)
        num_layers = subject.model.num_layers
        unprofiled = _host_line(measurement.steps)
        steps = dataclasses.asdict(measurement.steps)
        self._reports[name] = as_json(profile, num_layers) | {"steps_without_profiler": steps}
        print("\n".join(["", *profile_lines(name, profile, num_layers, _SHOWN_KINDS), unprofiled]), flush=True)
        self._lines += [*profile_lines(name, profile, num_layers), unprofiled, ""]
        self._write()

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        text = "\n".join([*(f"{name}: {value}" for name, value in self._facts.items()), "", *self._lines])
        (self._directory / "profile.txt").write_text(text)
        content = {**self._facts, "profiles": self._reports}
        (self._directory / "profile.json").write_text(json.dumps(content, indent=1) + "\n")
        tell(f"wrote profile.txt and profile.json in {self._directory}")


def _frames(subject: OwnEngine, traces: Sequence[Trace]) -> dict[str, dict[str, Frames]]:
    """Where the kernels come from, of each program that ran."""
    texts = subject.program_texts()
    ran = {event.program for trace in traces for event in trace.device_events}
    return {program: frames_of(texts[program]() or "") for program in ran & texts.keys()}


def _host_line(steps: StepFigures) -> str:
    parts = (("schedule", steps.schedule_ms), ("build", steps.build_ms), ("execute", steps.execute_ms))
    listed = [f"{name} {1e3 * ms:,.0f}" for name, ms in (*parts, ("wait", steps.wait_ms), ("update", steps.update_ms))]
    return f"the whole workload without the profiler, host, us a step: {', '.join(listed)}"
