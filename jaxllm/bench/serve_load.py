"""Requests and arrival times -> records. Knows rates, bursts and how many may be under way; no figures, no printing."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxllm.bench.serve_args import ServeBenchArgs
from jaxllm.bench.serve_client import Record
from jaxllm.bench.workloads import TOKEN_HIGH, TOKEN_LOW, WorkloadRequest, random_requests, workload
from jaxllm.config.errors import InputError
from jaxllm.planning.traffic import TracedRequest, read_trace


class Sender(Protocol):
    """What answers one request."""

    async def send(self, request: WorkloadRequest, planned: float, began: float) -> Record: ...


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and when each is to be sent, in seconds from the first on, ascending."""

    requests: Sequence[WorkloadRequest]
    arrivals: Sequence[float]


class Requests:
    """Where requests come from: a workload, a trace or chance; every repeat has the same lengths and other tokens.

    Raises:
        InputError: the trace cannot be read, or some of its lines tell when they come and others do not.
    """

    def __init__(self, args: ServeBenchArgs):
        self._args = args
        self._trace: list[TracedRequest] = []
        if args.trace is not None:
            self._trace = read_trace(args.trace)[: args.num_prompts]
            if len({request.arrival is None for request in self._trace}) > 1:
                raise InputError(f"trace={args.trace!r}: every line must have a timestamp, or none of them")
        self.vocab_size = TOKEN_HIGH

    @property
    def has_times(self) -> bool:
        """Says whether the trace tells when requests come, and nothing else does."""
        return bool(self._trace) and self._trace[0].arrival is not None and self._args.request_rate is None

    def draw(self, repeat: int) -> list[WorkloadRequest]:
        """Gives the requests with the tokens of a repeat, below the vocabulary's size."""
        args, (count, num_in, num_out) = self._args, self._args.lengths
        if args.workload is not None:
            found = workload(args.workload, args.seed, args.num_prompts, repeat)
        elif self._trace:
            rng = np.random.default_rng([args.seed, 7, repeat])
            found = [
                WorkloadRequest(rng.integers(TOKEN_LOW, TOKEN_HIGH, each.input_len).tolist(), each.output_len)
                for each in self._trace
            ]
        else:
            found = random_requests(count, num_in, num_out, args.seed, repeat)
            prefix = np.random.default_rng([args.seed, 8]).integers(TOKEN_LOW, TOKEN_HIGH, args.random_prefix_len)
            found = [request._replace(prompt=[*prefix.tolist(), *request.prompt]) for request in found]
        size = self.vocab_size
        return [r._replace(prompt=[token % size for token in r.prompt]) for r in found] if size < TOKEN_HIGH else found

    def load(self, repeat: int, rate: float | None = None) -> Load:
        """Gives the requests of a repeat at a rate, by default the one that the user wants or the trace tells."""
        requests = self.draw(repeat)
        if rate is None and self.has_times:
            times = [each.arrival or 0.0 for each in self._trace]
            order = sorted(range(len(times)), key=times.__getitem__)
            return Load([requests[i] for i in order], [times[i] - min(times) for i in order])
        rate = rate or self._args.request_rate or math.inf
        return Load(requests, arrival_times(len(requests), rate, self._args.burstiness, self._args.seed))


def arrival_times(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Draws when requests come, the first at 0: intervals of a gamma distribution, all together at the rate."""
    if rate == math.inf or count == 1:
        return [0.0] * count
    times = np.cumsum(np.random.default_rng([seed, 9]).gamma(burstiness, 1.0, count - 1))
    return [0.0, *(times * ((count - 1) / rate / times[-1])).tolist()]


async def run_load(
    sender: Sender, load: Load, max_concurrency: int | None, advance: Callable[[int], object]
) -> list[Record]:
    """Sends each request at its time, or when one may be; gives what became of them, in order."""
    gate = asyncio.Semaphore(max_concurrency or len(load.requests))
    began = time.perf_counter()

    async def one(request: WorkloadRequest, arrival: float) -> Record:
        async with gate:
            record = await sender.send(request, arrival, began)
        advance(1)
        return record

    tasks = []
    try:
        for request, arrival in zip(load.requests, load.arrivals, strict=True):
            if (ahead := arrival - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(ahead)
            tasks.append(asyncio.create_task(one(request, arrival)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
