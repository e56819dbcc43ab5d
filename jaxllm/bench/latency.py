"""`jaxllm bench latency`: one batch of requests, again and again with other prompts. Knows the order only."""

import dataclasses
import time
from typing import Any

from jaxllm.bench.args import LatencyArgs, add_bench_flags, workload_names
from jaxllm.options import OptionParser

TITLE = "bench latency"
_OWN = frozenset(field.name for field in dataclasses.fields(LatencyArgs))
_BATCH = (8, 32, 128)  # requests, prompt tokens, output tokens; vLLM's defaults


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_bench_flags(parser, LatencyArgs, TITLE)


def run(values: dict[str, Any]) -> int:
    """Measures; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    args = LatencyArgs(**{name: value for name, value in values.items() if name in _OWN})
    options = {name: value for name, value in values.items() if name not in _OWN}
    from jaxllm.bench.figures import Measurement, merged
    from jaxllm.bench.progress import progress_bar
    from jaxllm.bench.report import tell
    from jaxllm.bench.session import run_session
    from jaxllm.bench.subject import Subject, requests_for
    from jaxllm.bench.workloads import WorkloadRequest, random_requests, workload

    def batch_of(name: str, repeat: int) -> list[WorkloadRequest]:
        seed = options.get("seed", 0)
        if name != "batch":
            return workload(name, seed, repeat=repeat)
        count, num_in, num_out = _BATCH
        return random_requests(
            args.batch_size or count, args.input_len or num_in, args.output_len or num_out, seed, repeat
        )

    def measure(subject: Subject) -> list[Measurement]:
        measurements = []
        for name in workload_names(args.workload) or ("batch",):
            # The first measured batch is the workload itself, so that its digest is the comparison's.
            batches = [requests_for(subject, name, batch_of(name, repeat)) for repeat in range(args.num_iters)]
            start = time.perf_counter()
            with progress_bar(f"{name}: warming up", args.num_iters_warmup) as advance:
                for i in range(args.num_iters_warmup):
                    others = requests_for(subject, name, batch_of(name, args.num_iters + i))
                    subject.warm_up(others, lambda count: None)
                    advance(1)
            warm_up = time.perf_counter() - start
            runs = []
            with progress_bar(f"{name}: measuring", args.num_iters) as advance:
                for batch in batches:
                    runs.append(subject.run(batch, lambda count: None))
                    advance(1)
            m = merged(subject.name, name, batches, runs, warm_up)
            middle = sorted(m.iteration_seconds)[len(runs) // 2]
            tell(f"{name}: {1e3 * middle:,.1f} ms a batch, median of {len(runs)}, after {warm_up:.1f} s to warm up")
            measurements.append(m)
        return measurements

    return run_session(TITLE, values, args, options, measure)
