"""Traces, workloads and arrival processes -> the requests of a simulation. Knows lengths and times; no engine."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.bench.workloads import workload_lengths
from jaxllm.config.errors import InputError
from jaxllm.planning.traffic import TracedRequest

WORKLOADS = ("W1", "W2", "W3")
ARRIVALS = ("poisson", "constant", "at-once")


class Arrival(NamedTuple):
    """A request: its tokens, and when it comes, in seconds or as the number of the engine's step before which it does.

    A simulation has times or steps, not both.
    """

    input_len: int
    output_len: int
    time: float = 0.0
    step: int | None = None


def from_trace(trace: Sequence[TracedRequest], file: str) -> list[Arrival]:
    """Takes the arrivals of a trace, from its first on; without any, all come at once.

    Raises:
        InputError: some lines tell when they come and others do not, or some in steps and others in milliseconds.
    """
    told = {(request.arrival is not None, request.step is not None) for request in trace}
    if len(told) > 1 or told == {(True, True)}:
        raise InputError(
            f"trace={file!r}: every line must have a timestamp, or every line a step, or none of them either"
        )
    start = min((request.arrival for request in trace if request.arrival is not None), default=0.0)
    found = [Arrival(r.input_len, r.output_len, (r.arrival or start) - start, r.step) for r in trace]
    return sorted(found, key=lambda arrival: (arrival.step or 0, arrival.time))


def lengths_of(
    workload: str | None, input_len: int, output_len: int, num_requests: int | None
) -> list[tuple[int, int]]:
    """Gives the lengths of so many requests: those of a workload, again and again, or all the same.

    Raises:
        InputError: no workload has this name.
    """
    if workload is None:
        return [(input_len, output_len)] * (num_requests or 1000)
    if workload not in WORKLOADS:
        raise InputError(f"workload={workload!r} is not known; there are {', '.join(WORKLOADS)}")
    lengths = workload_lengths(workload)
    return [lengths[i % len(lengths)] for i in range(num_requests or len(lengths))]


def synthetic(lengths: Sequence[tuple[int, int]], arrivals: str, rate: float | None, seed: int = 0) -> list[Arrival]:
    """Lets requests come by a process: at random ("poisson"), evenly ("constant"), or all "at-once".

    Raises:
        InputError: the process is not known, or has no rate where it needs one.
    """
    if arrivals not in ARRIVALS:
        raise InputError(f"arrivals={arrivals!r} is not known; choose one of {', '.join(ARRIVALS)}")
    if arrivals == "at-once":
        return [Arrival(*pair) for pair in lengths]
    if rate is None:
        raise InputError(f"request_rate is missing: arrivals={arrivals!r} needs one, or take 'at-once'")
    draw, now, found = random.Random(seed), 0.0, []
    for pair in lengths:
        found.append(Arrival(*pair, now))
        now += draw.expovariate(rate) if arrivals == "poisson" else 1 / rate
    return found
