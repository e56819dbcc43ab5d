"""`jaxllm bench throughput`: workloads whose requests are all sent at once. Knows the order: warm up, measure."""

import functools
import time
from typing import TYPE_CHECKING, Any

from jaxllm.bench.args import ThroughputArgs, add_bench_flags, sorted_values, workload_names
from jaxllm.options import OptionParser

if TYPE_CHECKING:  # what measures is imported when it is called: --help and mistakes need none of it
    from jaxllm.bench.figures import Measurement
    from jaxllm.bench.session import Profile
    from jaxllm.bench.subject import Subject
    from jaxllm.bench.workloads import WorkloadRequest

TITLE = "bench throughput"
_RANDOM = (1000, 1024, 128)  # requests, prompt tokens, output tokens; vLLM's defaults


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_bench_flags(parser, ThroughputArgs, TITLE)


def run(values: dict[str, Any]) -> int:
    """Measures; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    args, options = sorted_values(ThroughputArgs, values)
    from jaxllm.bench.session import run_session

    measure = functools.partial(_measure, args, options.get("seed", 0))
    return run_session(TITLE, values, args, options, measure)


def _measure(args: ThroughputArgs, seed: int, subject: "Subject", profile: "Profile | None") -> "list[Measurement]":
    measurements = []
    for name in workload_names(args.workload) or ("random",):
        requests, others = _requests(args, name, seed, 0), _requests(args, name, seed, 1)
        m, sent = measure_at_once(subject, name, requests, others)
        measurements.append(m)
        if profile is not None:
            profile(sent, m)
    return measurements


def measure_at_once(
    subject: "Subject", name: str, drawn: "list[WorkloadRequest]", drawn_to_warm_up: "list[WorkloadRequest]"
) -> "tuple[Measurement, list[WorkloadRequest]]":
    """Measures requests after others of the same lengths; gives them too, as the subject got them."""
    from jaxllm.bench.figures import measured
    from jaxllm.bench.progress import progress_bar
    from jaxllm.bench.report import tell
    from jaxllm.bench.subject import requests_for
    from jaxllm.bench.workloads import digest

    requests, others = requests_for(subject, name, drawn), requests_for(subject, name, drawn_to_warm_up)
    if requests != drawn:
        tell(f"{name}: token ids folded into a vocabulary of {subject.vocab_size:,}, so its digest is another")
    start = time.perf_counter()
    with progress_bar(f"{name}: warming up", len(others)) as advance:
        subject.warm_up(others, advance)
    warm_up = time.perf_counter() - start
    with progress_bar(f"{name}: measuring", len(requests)) as advance:
        result = subject.run(requests, advance)
    m = measured(subject.name, name, digest(requests), requests, result, warm_up)
    tell(
        f"{name}: {m.output_tokens_per_second:,.1f} output tok/s in {m.seconds:.2f} s, after {warm_up:.1f} s to warm up"
    )
    return m, requests


def _requests(args: ThroughputArgs, name: str, seed: int, repeat: int) -> "list[WorkloadRequest]":
    from jaxllm.bench.workloads import random_requests, workload

    if name != "random":
        return workload(name, seed, args.num_prompts, repeat)
    count, num_in, num_out = _RANDOM
    return random_requests(
        args.num_prompts or count, args.input_len or num_in, args.output_len or num_out, seed, repeat
    )
