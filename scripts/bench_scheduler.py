"""Times one schedule and one update of the scheduler alone, decoding with W2's lengths, and prints one table.

python scripts/bench_scheduler.py --running 256,1024
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
from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig

MAX_MODEL_LEN = 4096
HEADER = ("running", "prefix caching", "steps", "schedule µs", "update µs", "both: median", "mean", "p99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", default="256,1024", help="comma-separated numbers of running requests")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--groups", type=int, default=1, help="KV groups without a window")
    args = parser.parse_args()
    print(f"command: {' '.join(sys.argv)}\ncommit:  {commit()}\ndevice:  {cpu()}, Python {platform.python_version()}")
    rows: list[tuple[str, ...]] = [HEADER]
    for running in (int(n) for n in args.running.split(",")):
        for caching in (True, False):
            rows.append(measure(running, args.steps, args.block_size, args.groups, caching))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def measure(running: int, num_steps: int, block_size: int, num_groups: int, caching: bool) -> tuple[str, ...]:
    """Gives a row of the table: every row busy, one step ahead of the host, whoever ends is replaced at once."""
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, 4 * running),
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
    )
    num_blocks = running * MAX_MODEL_LEN // block_size * num_groups
    scheduler = Scheduler(config, BlockPool(num_blocks + 1, block_size), KVGroups((None,) * num_groups))
    lengths = [(list(request.prompt), request.output_len) for request in workload("W2")]
    added = 0
    in_flight: list[ScheduledBatch] = []
    times: list[tuple[float, float]] = []
    while len(times) < num_steps:
        while scheduler.num_running + scheduler.num_waiting < running:
            prompt, output_len = lengths[added % len(lengths)]
            scheduler.add(Request(str(added), [added, *prompt[1:]], output_len))
            added += 1
        start = time.perf_counter()
        batch = scheduler.schedule()
        scheduled = time.perf_counter()
        assert batch is not None
        in_flight.append(batch)
        if len(in_flight) < 2:
            continue
        oldest = in_flight.pop(0)
        tokens = [7] * len(oldest.items)
        before = time.perf_counter()
        scheduler.update(oldest, tokens)
        updated = time.perf_counter()
        if len(oldest.items) >= 0.95 * running and batch.step > 200:  # the lengths have mixed, all rows are busy
            times.append((scheduled - start, updated - before))
    both = sorted(a + b for a, b in times)
    return (
        str(running),
        "on" if caching else "off",
        str(len(times)),
        _micro([a for a, _ in times]),
        _micro([b for _, b in times]),
        _micro(both),
        f"{statistics.fmean(both) * 1e6:.0f}",
        f"{both[int(len(both) * 0.99)] * 1e6:.0f}",
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
