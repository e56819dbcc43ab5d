"""`jaxllm bench latency`: one batch of requests, again and again with other prompts. Knows the order only."""

import functools
import time
from typing import TYPE_CHECKING, Any

from jaxllm.bench.args import LatencyArgs, add_bench_flags, sorted_values, workload_names
from jaxllm.options import OptionParser

if TYPE_CHECKING:  # what measures is imported when it is called: --help and mistakes need none of it
    from jaxllm.bench.figures import Measurement
    from jaxllm.bench.session import Profile
    from jaxllm.bench.subject import Subject
    from jaxllm.bench.workloads import WorkloadRequest

TITLE = "bench latency"
_BATCH = (8, 32, 128)  # requests, prompt tokens, output tokens; vLLM's defaults


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_bench_flags(parser, LatencyArgs, TITLE)


def run(values: dict[str, Any]) -> int:
    """Measures; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    args, options = sorted_values(LatencyArgs, values)
    from jaxllm.bench.session import run_session

    measure = functools.partial(_measure, args, options.get("seed", 0))
    return run_session(TITLE, values, args, options, measure)


def _measure(args: LatencyArgs, seed: int, subject: "Subject", profile: "Profile | None") -> "list[Measurement]":
    from jaxllm.bench.subject import requests_for

    measurements = []
    for name in workload_names(args.workload) or ("batch",):
        drawn = [_batch(args, name, seed, repeat) for repeat in range(args.num_iters + args.num_iters_warmup)]
        batches = [requests_for(subject, name, batch) for batch in drawn]
        # The first measured batch is the workload itself, so that its digest is the comparison's.
        m = measure_batches(subject, name, batches[: args.num_iters], batches[args.num_iters :])
        measurements.append(m)
        if profile is not None:
            profile(batches[0], m)
    return measurements


def measure_batches(
    subject: "Subject", name: str, batches: "list[list[WorkloadRequest]]", to_warm_up: "list[list[WorkloadRequest]]"
) -> "Measurement":
    """Measures one batch after the other, behind others of the same lengths."""
    from jaxllm.bench.figures import merged
    from jaxllm.bench.progress import progress_bar
    from jaxllm.bench.report import tell

    start = time.perf_counter()
    with progress_bar(f"{name}: warming up", len(to_warm_up)) as advance:
        for batch in to_warm_up:
            subject.warm_up(batch, lambda count: None)
            advance(1)
    warm_up = time.perf_counter() - start
    runs = []
    with progress_bar(f"{name}: measuring", len(batches)) as advance:
        for batch in batches:
            runs.append(subject.run(batch, lambda count: None))
            advance(1)
    m = merged(subject.name, name, batches, runs, warm_up)
    middle = sorted(m.iteration_seconds)[len(runs) // 2]
    tell(f"{name}: {1e3 * middle:,.1f} ms a batch, median of {len(runs)}, after {warm_up:.1f} s to warm up")
    return m


def _batch(args: LatencyArgs, name: str, seed: int, repeat: int) -> "list[WorkloadRequest]":
    from jaxllm.bench.workloads import random_requests, workload

    if name != "batch":
        return workload(name, seed, repeat=repeat)
    count, num_in, num_out = _BATCH
    return random_requests(args.batch_size or count, args.input_len or num_in, args.output_len or num_out, seed, repeat)
