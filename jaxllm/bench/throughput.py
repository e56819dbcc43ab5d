"""`jaxllm bench throughput`: workloads whose requests are all sent at once. Knows the order: warm up, measure."""

import dataclasses
import time
from typing import Any

from jaxllm.bench.args import ThroughputArgs, add_bench_flags, workload_names
from jaxllm.options import OptionParser

TITLE = "bench throughput"
_OWN = frozenset(field.name for field in dataclasses.fields(ThroughputArgs))
_RANDOM = (1000, 1024, 128)  # requests, prompt tokens, output tokens; vLLM's defaults


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_bench_flags(parser, ThroughputArgs, TITLE)


def run(values: dict[str, Any]) -> int:
    """Measures; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    args = ThroughputArgs(**{name: value for name, value in values.items() if name in _OWN})
    options = {name: value for name, value in values.items() if name not in _OWN}
    from jaxllm.bench.figures import Measurement, measured
    from jaxllm.bench.progress import progress_bar
    from jaxllm.bench.report import tell
    from jaxllm.bench.session import run_session
    from jaxllm.bench.subject import Subject, requests_for
    from jaxllm.bench.workloads import WorkloadRequest, digest, random_requests, workload

    def requests_of(name: str, repeat: int) -> list[WorkloadRequest]:
        seed = options.get("seed", 0)
        if name != "random":
            return workload(name, seed, args.num_prompts, repeat)
        count, num_in, num_out = _RANDOM
        return random_requests(
            args.num_prompts or count, args.input_len or num_in, args.output_len or num_out, seed, repeat
        )

    def measure(subject: Subject) -> list[Measurement]:
        measurements = []
        for name in workload_names(args.workload) or ("random",):
            drawn = requests_of(name, 0)
            requests = requests_for(subject, name, drawn)
            others = requests_for(subject, name, requests_of(name, 1))
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
                f"{name}: {m.output_tokens_per_second:,.1f} output tok/s in {m.seconds:.2f} s, "
                f"after {warm_up:.1f} s to warm up"
            )
            measurements.append(m)
        return measurements

    return run_session(TITLE, values, args, options, measure)
