"""Times what a step costs the host: schedule, build inputs, update; with a workload's lengths. Prints one table.

python scripts/bench_scheduler.py --running 256,1024

Times are of this thread on its core, so that other programs on a busy machine do not count, medians over the steps.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxllm.bench.workloads import workload
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.buckets import make_buckets
from jaxllm.engine.input_builder import InputBuilder
from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig

MAX_MODEL_LEN = 4096
VOCAB_SIZE = 128_256
HEADER = ("running", "prefix caching", "steps", "schedule µs", "build µs", "update µs", "all: median", "mean", "p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", default="256,1024", help="comma-separated numbers of running requests")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--workload", default="W2", help="W2 (requests come and go in every step), W1 (they hardly do)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--groups", type=int, default=1, help="KV groups without a window")
    args = parser.parse_args()
    print(f"command: {' '.join(sys.argv)}\ncommit:  {commit()}\ndevice:  {cpu()}, Python {platform.python_version()}")
    rows: list[tuple[str, ...]] = [HEADER]
    for running in (int(n) for n in args.running.split(",")):
        for caching in (True, False):
            rows.append(measure(running, args, caching))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def measure(running: int, args: argparse.Namespace, caching: bool) -> tuple[str, ...]:
    """Gives a row of the table: every row busy, one step ahead of the host, whoever ends is replaced at once."""
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, 4 * running),
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
    )
    max_blocks = MAX_MODEL_LEN // args.block_size
    pool = BlockPool(running * max_blocks * args.groups + 1, args.block_size)
    scheduler = Scheduler(config, pool, KVGroups((None,) * args.groups))
    buckets = make_buckets(running, config.max_num_batched_tokens, max_blocks, coarse=False)
    builder = InputBuilder(buckets, running, max_blocks, args.groups, vocab_size=VOCAB_SIZE)
    params = SamplingParams(temperature=args.temperature, seed=1)
    lengths = [(list(request.prompt), request.output_len) for request in workload(args.workload)]
    added = 0
    in_flight: list[ScheduledBatch] = []
    times: list[tuple[float, float, float]] = []
    while len(times) < args.steps:
        while scheduler.num_running + scheduler.num_waiting < running:
            prompt, output_len = lengths[added % len(lengths)]
            scheduler.add(Request(str(added), [added, *prompt[1:]], output_len, params=params))
            added += 1
        start = time.thread_time()
        batch = scheduler.schedule()
        scheduled = time.thread_time()
        if batch is not None:
            builder.build(batch)
            in_flight.append(batch)
        built = time.thread_time()
        if len(in_flight) < 2 and batch is not None:
            continue
        oldest = in_flight.pop(0)
        tokens = [7] * oldest.num_requests
        before = time.thread_time()
        scheduler.update(oldest, tokens)
        updated = time.thread_time()
        if oldest.num_requests >= 0.95 * running and oldest.step > 200:  # the lengths have mixed, all rows are busy
            times.append((scheduled - start, built - scheduled, updated - before))
    total = sorted(map(sum, times))
    return (
        str(running),
        "on" if caching else "off",
        str(len(times)),
        *(_micro(part) for part in zip(*times, strict=True)),
        _micro(total),
        f"{statistics.fmean(total) * 1e6:.0f}",
        f"{total[int(len(total) * 0.99)] * 1e6:.0f}",
    )


def _micro(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:.0f}"


def cpu() -> str:
    """The name of the processor, as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def commit() -> str:
    """The short hash of the checkout, with a mark if it has changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
