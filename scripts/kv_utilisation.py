"""Counts how well lent KV blocks are filled, by block size, and what sliding windows give back.

python scripts/kv_utilisation.py
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench_scheduler import commit

from jaxllm.bench.workloads import workload_lengths
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig

WINDOWS = (512, 512, 512, 512, 512, None)  # Gemma 3 270M: six groups of three layers
BLOCKS = ("block size", "running", "pool lent", "slots filled", "empty slots a request", "static filled", "preemptions")
GROUPS = ("windows", "blocks for one 4,096-token request", "requests at once", "tokens at once", "factor")


@dataclass(frozen=True, slots=True)
class Reading:
    """Means over the steps of a run that had requests waiting."""

    running: float
    usage: float
    utilisation: float
    tokens: float  # held by all running requests
    preemptions: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--block-sizes", default="8,16,32,64,128")
    parser.add_argument("--max-model-len", type=int, default=4096, help="what a static allocation gives each request")
    args = parser.parse_args()
    print(f"command: {' '.join(sys.argv)}\ncommit:  {commit()}\n")
    sizes = [int(size) for size in args.block_sizes.split(",")]
    ample = play(args.running, args.running * args.max_model_len, 1, args.max_model_len)
    full = int(ample.tokens)
    print(f"W2's lengths, {args.running} rows, a pool of {full:,} slots: what that many requests hold on average.\n")
    rows: list[tuple[str, ...]] = [BLOCKS]
    for size in sizes:
        seen = play(args.running, full, size, args.max_model_len)
        empty = seen.tokens / seen.utilisation * (1 - seen.utilisation) / seen.running
        static = seen.tokens / seen.running / args.max_model_len
        rows.append(
            (
                str(size),
                f"{seen.running:.0f}",
                f"{seen.usage:.1%}",
                f"{seen.utilisation:.1%}",
                f"{empty:.1f}",
                f"{static:.1%}",
                str(seen.preemptions),
            )
        )
    show(rows)
    print("\nGemma 3 270M's KV groups, 4,096-token requests, block size 16, chunks of 512, a pool of 30,000 blocks.\n")
    counts = {windows: concurrent(windows) for windows in ((None,) * 6, WINDOWS)}
    rows = [GROUPS]
    for windows, (blocks, requests, tokens) in counts.items():
        factor = tokens / counts[(None,) * 6][2]
        name = "kept" if windows != WINDOWS else "given back"
        rows.append((name, str(blocks), str(requests), f"{tokens:,}", f"{factor:.2f}"))
    show(rows)


def play(running: int, num_slots: int, block_size: int, max_model_len: int) -> Reading:
    """Runs W2 through the scheduler and reads the pool after each step, as long as requests wait."""
    config = SchedulerConfig(
        max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=max_model_len, enable_prefix_caching=False
    )
    scheduler = Scheduler(config, BlockPool(num_slots // block_size + 1, block_size), KVGroups())
    for i, (num_prompt, num_output) in enumerate(workload_lengths("W2")):
        scheduler.add(Request(str(i), [1] * num_prompt, num_output))
    readings: list[tuple[float, float, float, float]] = []
    while batch := scheduler.schedule():
        if scheduler.num_waiting and batch.step > 200:  # all lengths have mixed by then
            stats, share = scheduler.stats, scheduler.kv_utilisation
            held = share * stats.kv_usage * (num_slots // block_size) * block_size
            readings.append((stats.running, stats.kv_usage, share, held))
        scheduler.update(batch, [7] * batch.num_requests)
    means = [statistics.fmean(column) for column in zip(*readings, strict=True)]
    return Reading(*means, preemptions=scheduler.stats.num_preemptions)


def concurrent(windows: tuple[int | None, ...]) -> tuple[int, int, int]:
    """Counts one request's blocks near its end, and the requests and tokens that a full pool holds at once."""
    length, block_size, num_output = 4096, 16, 256
    pool, groups = BlockPool(30_001, block_size), KVGroups(windows)
    config = SchedulerConfig(
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=length,
        long_prefill_token_threshold=512,
        enable_prefix_caching=False,
    )
    scheduler = Scheduler(config, pool, groups)
    for i in range(100):
        scheduler.add(Request(str(i), [1] * (length - num_output), num_output))
    most, most_tokens = 0, 0
    while len(scheduler.living) == 100 and (batch := scheduler.schedule()):
        decoding = [item.request for item in batch.items if item.request.output_ids]
        most = max(most, len(decoding))
        most_tokens = max(most_tokens, sum(request.num_computed for request in decoding))
        scheduler.update(batch, [7] * batch.num_requests)
    return groups.num_blocks(length, block_size, 1), most, most_tokens


def show(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows as a table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * (width - 1) + ":" for width in widths]
    for row in (rows[0], rule, *rows[1:]):
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")


if __name__ == "__main__":
    main()
