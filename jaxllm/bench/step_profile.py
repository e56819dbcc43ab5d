"""Events of a trace -> how a step's time divides, on the device and on the host. Knows intervals and names only.

The device's time is divided without counting anything twice: at each instant it belongs to the kernel that began first,
and where none runs it is a gap. So groups and gaps of a kind of step add up to its time. Transfers between host and
device run beside the kernels: they are listed, and not part of that sum.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxllm.bench.kernel_groups import Frames, frames_for, group_of
from jaxllm.bench.trace import HostEvent, Trace
from jaxllm.engine.profile import PREFIX

_EXECUTE = PREFIX + "execute "
_GRAPH_LAUNCH = "cuGraphLaunch"
OUTSIDE = "outside steps"


@dataclass(slots=True)
class Tally:
    """Calls and nanoseconds: `busy` without what something else covers, `total` with it."""

    count: int = 0
    busy: float = 0.0
    total: float = 0.0

    def add(self, busy: float, total: float) -> None:
        self.count += 1
        self.busy += busy
        self.total += total


@dataclass(slots=True)
class StepKind:
    """All steps of one shape."""

    num_steps: int = 0
    gap_inside: float = 0.0  # nanoseconds in which the device ran nothing, between two kernels of one step
    gap_before: float = 0.0  # likewise before a step's first kernel, the trace's first step excepted
    groups: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    kernels: dict[tuple[str, str], Tally] = field(default_factory=lambda: defaultdict(Tally))  # by group and name
    phases: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))  # of the host
    calls: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))  # of the engine's thread, in execute
    others: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))  # of other threads, until the next

    @property
    def busy(self) -> float:
        return sum(tally.busy for tally in self.groups.values())

    @property
    def wall(self) -> float:
        return self.busy + self.gap_inside + self.gap_before


@dataclass(slots=True)
class Profile:
    """The kinds of steps of one or several traces, by their names."""

    device: str = ""
    num_kernels: int = 0
    num_in_graphs: int = 0  # kernels that a CUDA graph launched, which XLA calls a command buffer
    num_unplaced: int = 0  # kernels of which it cannot be told to which step they belong
    kinds: dict[str, StepKind] = field(default_factory=lambda: defaultdict(StepKind))


def add_trace(profile: Profile, trace: Trace, frames: Mapping[str, Mapping[str, Frames]]) -> None:
    """Adds the steps of a trace; `frames` tells for each program where its kernels come from."""
    steps = sorted((event for event in trace.host_events if event.name.startswith(_EXECUTE)), key=lambda e: e.start)
    kinds = [kind_of(step.name.removeprefix(_EXECUTE)) for step in steps]
    profile.device = trace.device
    for kind in kinds:
        profile.kinds[kind].num_steps += 1
    _divide_device(profile, trace, steps, kinds, frames)
    if steps:
        _divide_host(profile, trace.host_events, steps, kinds)


def kind_of(shape: str) -> str:
    """A step's shape, or its program's name, without the table's width and without what most steps give."""
    parts = re.match(r"(\w+?)[ _]T=?(\d+)[ _]B=?(\d+)[ _]M=?\d+[ _](\w+)$", shape)
    if parts is None:
        return shape
    program, num_tokens, num_requests, variant = parts.groups()
    return f"{program} T={num_tokens} B={num_requests}{'' if variant == 'greedy' else f' {variant}'}"


def _divide_device(
    profile: Profile, trace: Trace, steps: Sequence[HostEvent], kinds: Sequence[str], frames: Mapping
) -> None:
    graphs = {event.launch for event in trace.host_events if event.name.startswith(_GRAPH_LAUNCH)} - {None}
    covered, last_step = None, None
    for event, step in zip(trace.device_events, _steps_of(trace, steps), strict=True):
        label = event.program.removeprefix("jit_")
        name = kinds[step] if step is not None else kind_of(label) if label.startswith(("decode", "mixed")) else OUTSIDE
        kind, length = profile.kinds[name], event.end - event.start
        source = frames_for(event.name, event.operation, frames.get(event.program, {}))
        group = group_of(event.name, source)
        if event.is_transfer:
            kind.kernels[group, event.name].add(0.0, length)
            continue
        profile.num_kernels += 1
        profile.num_in_graphs += event.launch in graphs
        profile.num_unplaced += step is None
        if covered is not None and event.start > covered:
            gap = event.start - covered
            kind.gap_inside += gap * (step == last_step)
            kind.gap_before += gap * (step != last_step)
        busy = length if covered is None else max(0.0, event.end - max(event.start, covered))
        covered = event.end if covered is None else max(covered, event.end)
        last_step = step
        kind.groups[group].add(busy, length)
        kind.kernels[group, _without_counter(event.name, source)].add(busy, length)


def _steps_of(trace: Trace, steps: Sequence[HostEvent]) -> list[int | None]:
    """To which step each of the device's events belongs: the one in or behind whose launch the host started it.

    Where launches are not recorded (a CPU), the runs of a program are counted off against the steps of its shape.
    """
    starts = [step.start for step in steps]
    labels = [step.name.removeprefix(_EXECUTE).replace(" ", "_").replace("=", "") for step in steps]
    launches = {event.launch: event.start for event in trace.host_events if event.launch is not None}
    free = defaultdict(list)  # steps of each shape that no run has been counted off against
    for i in reversed(range(len(steps))):
        free[labels[i]].append(i)
    runs: dict[tuple[str, int], int | None] = {}
    places: list[int | None] = []
    for event in trace.device_events:
        label = event.program.removeprefix("jit_")
        if event.launch in launches:
            i = bisect_right(starts, launches[event.launch]) - 1
            if label in free and i >= 0 and labels[i] != label:  # another thread launched it, a little later
                i = i - 1 if i > 0 and labels[i - 1] == label else -1
            places.append(i if i >= 0 else None)
        elif event.run is not None and label in free:
            run = (event.program, event.run)
            if run not in runs:
                runs[run] = free[label].pop() if free[label] else None
            places.append(runs[run])
        else:
            places.append(None)
    return places


def _without_counter(name: str, source: Frames) -> str:
    """A kernel's name without the number that XLA gives to each of several; with the function that it comes from."""
    plain = re.sub(r"([._]\d+)+$", "", name)
    return f"{plain} <- {source[0].rpartition(':')[2]}" if source else plain


def _divide_host(
    profile: Profile, events: Sequence[HostEvent], steps: Sequence[HostEvent], kinds: Sequence[str]
) -> None:
    engine, starts = steps[0].thread, [step.start for step in steps]
    last_end = steps[-1].end
    for event, own in _own_times(events):
        i = bisect_right(starts, event.start) - 1
        if event.thread == engine and event.name.startswith(PREFIX):
            phase = event.name.removeprefix(PREFIX).partition(" ")[0]
            # What precedes a launch belongs to the step that will be launched.
            place = i + 1 if phase in ("schedule", "build") else i
            if 0 <= place < len(steps):
                profile.kinds[kinds[place]].phases[phase].add(own, event.end - event.start)
        elif i < 0:
            continue
        elif event.thread == engine and event.start < steps[i].end:
            profile.kinds[kinds[i]].calls[_plain(event.name)].add(own, event.end - event.start)
        elif event.thread != engine and event.start < last_end:
            profile.kinds[kinds[i]].others[_plain(event.name)].add(own, event.end - event.start)


def _own_times(events: Iterable[HostEvent]) -> list[tuple[HostEvent, float]]:
    """Each event with its time less that of the events right within it, on the same thread."""
    own: list[float] = []
    listed: list[HostEvent] = []
    open_events: dict[str, list[int]] = defaultdict(list)
    for event in events:
        stack = open_events[event.thread]
        while stack and listed[stack[-1]].end <= event.start:
            stack.pop()
        if stack:
            own[stack[-1]] -= min(event.end, listed[stack[-1]].end) - event.start
        stack.append(len(listed))
        listed.append(event)
        own.append(event.end - event.start)
    return list(zip(listed, own, strict=True))


def _plain(name: str) -> str:
    """A call's name without what differs from step to step."""
    return re.sub(r"(\d{3,}|0x[0-9a-f]+)", "*", name.partition("#")[0])[:70]
