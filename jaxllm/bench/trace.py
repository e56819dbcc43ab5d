"""A trace that jax's profiler wrote -> plain events of the host and of one device. Knows its file; groups nothing.

On a GPU the device's events are what its streams ran: kernels, copies. A CPU has none of its own: there the operations
that XLA's threads ran stand for them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxllm.config.errors import InputError

_CONTAINER = re.compile(r"(while|call|cond|conditional|case)(\.|$)")  # a CPU's operations that only run others
_TRANSFER = re.compile(r"Memcpy(HtoD|DtoH|H2D|D2H)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HostEvent:
    """What a thread did, in nanoseconds; events of one thread nest. `launch` names what it started on the device."""

    name: str
    thread: str
    start: float
    end: float
    launch: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A kernel or a copy. `launch` is the call that started it (a whole graph has one), `run` one run of a program."""

    name: str
    start: float
    end: float
    operation: str = ""  # XLA's name for it
    program: str = ""
    launch: int | None = None
    run: int | None = None

    @property
    def is_transfer(self) -> bool:
        """Between host and device: beside the kernels, not among them."""
        return _TRANSFER.search(self.name) is not None


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one trace, each list by its start."""

    device: str
    host_events: tuple[HostEvent, ...]
    device_events: tuple[DeviceEvent, ...]


def read_trace(directory: Path) -> Trace:
    """Reads the newest trace below a directory.

    Raises:
        InputError: there is none.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise InputError(f"there is no trace below {directory}")
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    gpus = sorted((plane for plane in planes if plane.name.startswith("/device:GPU")), key=lambda plane: plane.name)
    host_events, device_events = [], []
    for plane in planes:
        if plane.name.startswith("/host:"):
            for number, line in enumerate(plane.lines):
                for event in line.events:
                    stats = dict(event.stats)
                    if "hlo_op" not in stats and not event.name.startswith("end: "):  # whose start has it
                        host_events.append(_host_event(event, f"{plane.name} {number} {line.name}", stats))
                    elif "hlo_op" in stats and not gpus and not _CONTAINER.match(event.name):
                        device_events.append(_device_event(event, stats))
    for line in gpus[0].lines if gpus else ():
        if line.name.startswith("Stream"):  # the others are drawn from these
            device_events += [_device_event(event, dict(event.stats)) for event in line.events]
    return Trace(
        gpus[0].name.removeprefix("/device:") if gpus else "CPU",
        tuple(sorted(host_events, key=lambda event: (event.start, -event.end))),
        tuple(sorted(device_events, key=lambda event: (event.start, event.end))),
    )


def _host_event(event, thread: str, stats: dict) -> HostEvent:
    return HostEvent(event.name, thread, event.start_ns, event.end_ns, _number(stats.get("correlation_id")))


def _device_event(event, stats: dict) -> DeviceEvent:
    return DeviceEvent(
        event.name,
        event.start_ns,
        event.end_ns,
        str(stats.get("hlo_op", "")),
        str(stats.get("hlo_module", "")),
        _number(stats.get("correlation_id")),
        _number(stats.get("run_id")),
    )


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else None
