"""A trace of requests -> what the planner takes of it. Knows the file's form; no engine.

One JSON object a line, with `input_length` and `output_length` in tokens and, if the rate is to come from it,
`timestamp` in milliseconds: the form of the published Mooncake and Azure-like traces. A simulation also takes `step`,
the number of the engine's step before which a request comes. Other keys are ignored.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxllm.config.errors import InputError


class TracedRequest(NamedTuple):
    """One line of a trace; the arrival in seconds, or before which step, or neither."""

    arrival: float | None
    input_len: int
    output_len: int
    step: int | None = None


def read_trace(file: str) -> list[TracedRequest]:
    """Reads a trace.

    Raises:
        InputError: it cannot be read, or a line is not of its form.
    """
    try:
        lines = Path(file).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"trace={file!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    found = [_request(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"trace={file!r} has no request in it")
    return found


def means_of(requests: Sequence[TracedRequest]) -> tuple[float, float, float | None]:
    """Gives mean input and output length, and requests a second where arrivals tell."""
    count = len(requests)
    arrivals = [request.arrival for request in requests if request.arrival is not None]
    rate = None
    if len(arrivals) == count and (span := max(arrivals) - min(arrivals)) > 0:
        rate = (count - 1) / span
    return sum(r.input_len for r in requests) / count, sum(r.output_len for r in requests) / count, rate


def _request(file: str, number: int, line: str) -> TracedRequest:
    try:
        said = json.loads(line)
        arrival, step = said.get("timestamp"), said.get("step")
        request = TracedRequest(
            None if arrival is None else float(arrival) / 1e3,
            int(said["input_length"]),
            int(said["output_length"]),
            None if step is None else int(step),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"trace={file!r}, line {number}: {said}") from None
    if request.input_len < 1 or request.output_len < 1:
        raise InputError(f"trace={file!r}, line {number}: lengths must be at least 1")
    return request
