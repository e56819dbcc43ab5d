"""Runs workloads through the real scheduler and buckets on a device that is a formula, and prints one table.

python scripts/simulate_workload.py --workloads W1,W2,W3 --max-num-seqs 256

The formula is an 8B model in bfloat16 on one H200: what a step takes besides attention, by its tokens with padding, and
the bytes of keys and values at copy bandwidth. Set by hand to decode steps and products timed apart, it gives W1, W2
and W3 of docs/benchmarks/engine-8b-h200.json within 3%.
"""

import argparse
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxllm.bench.workloads import workload
from jaxllm.engine.buckets import StepShape, make_buckets
from jaxllm.scheduler.batch import RankBatch, ScheduledBatch
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig

MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 4096, 16, 52_736
# (tokens, ms) of a step without attention
PRODUCTS = ((1, 4.33), (64, 4.7), (128, 5.9), (256, 7.5), (512, 12.0), (1024, 22.8), (2048, 45.0), (8192, 178.0))
MIXED_MS = 1.0  # a mixed step is scanned and not captured
KV_MS = 131_072 / 3.95e12 * 1e3  # a token of context, read
PREFILL_MS = 524_288 / 300e12 * 1e3  # a token of context that a prompt's token sees
HEADER = ("workload", "out tok/s", "seconds", "steps", "batch", "padding %", "TTFT ms", "ITL ms p50", "p90", "p99")


class Outcome(NamedTuple):
    """What a simulated run brought; times in ms."""

    total: float
    num_steps: int
    num_requests: int  # summed over the steps
    num_tokens: int
    num_padded: int
    first: list[float]
    gaps: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-prefill-tokens", type=int, default=0)
    parser.add_argument("--scheduling-policy", default="fcfs")
    parser.add_argument("--target-tpot-ms", type=float)
    parser.add_argument("--no-filling", action="store_true", help="take all that fits, whatever the padding")
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = [HEADER]
    for name in args.workloads.split(","):
        rows.append(table_row(name, simulate(name, args)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def simulate(name: str, args: argparse.Namespace) -> Outcome:
    """Runs a workload whose requests all come at once, one step ahead of the host as the engine does."""
    buckets = make_buckets(args.max_num_seqs, args.max_num_batched_tokens, MAX_MODEL_LEN // BLOCK_SIZE, coarse=False)
    config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        max_prefill_tokens=args.max_prefill_tokens,
        policy=args.scheduling_policy,
        enable_prefix_caching=False,
        step_sizes=() if args.no_filling else buckets.fillable,
    )
    pace = None
    if args.target_tpot_ms is not None:
        pace = Pace(args.target_tpot_ms / 1e3, buckets.mixed_sizes, buckets.decode_size)
    scheduler = Scheduler(config, BlockPool(NUM_BLOCKS, BLOCK_SIZE), KVGroups(), pace)
    for i, request in enumerate(workload(name)):
        scheduler.add(Request(str(i), request.prompt, request.output_len))
    in_flight: deque[tuple[ScheduledBatch, StepShape, float]] = deque()
    last: dict[str, float] = {}
    now = idle_from = 0.0  # of the host, and of the device
    num_steps = num_requests = num_tokens = num_padded = 0
    first: list[float] = []
    gaps: list[float] = []
    while scheduler.has_work or in_flight:
        batch = scheduler.schedule()
        if batch is not None:
            shape = buckets.shape(batch.num_tokens, len(batch.items), 1, "greedy")
            idle_from = max(idle_from, now) + step_ms(shape, batch)
            in_flight.append((batch, shape, idle_from))
            num_steps += 1
            num_requests += len(batch.items)
            num_tokens += batch.num_tokens
            num_padded += shape.num_tokens - batch.num_tokens
        if len(in_flight) > (batch is not None):
            before_it = now
            oldest, shape, now = in_flight.popleft()
            if pace is not None:
                context = sum(item.start + item.count for item in oldest.items)
                pace.time.observe(shape.num_tokens, shape.program == "decode", context, (now - before_it) / 1e3)
            for update in scheduler.update(oldest, [7] * len(oldest.items)):
                before = last.get(update.request_id)
                first.append(now) if before is None else gaps.append(now - before)
                last[update.request_id] = now
    return Outcome(now, num_steps, num_requests, num_tokens, num_padded, first, sorted(gaps))


def step_ms(shape: StepShape, batch: ScheduledBatch | RankBatch) -> float:
    """Gives what a step takes by the formula."""
    spent = _interpolate(shape.num_tokens) + KV_MS * sum(item.start + item.count for item in batch.items)
    if shape.program == "decode":
        return spent
    seen = sum(item.count * (item.start + item.count / 2) for item in batch.items if item.count > 1)
    return spent + MIXED_MS + PREFILL_MS * seen


def _interpolate(num_tokens: int) -> float:
    index = min(max(bisect_left(PRODUCTS, (num_tokens,)), 1), len(PRODUCTS) - 1)
    (t0, ms0), (t1, ms1) = PRODUCTS[index - 1 : index + 1]
    return ms0 + (ms1 - ms0) * (num_tokens - t0) / (t1 - t0)


def table_row(name: str, outcome: Outcome) -> tuple[str, ...]:
    """Gives a row of the table."""
    return (
        name,
        f"{(len(outcome.first) + len(outcome.gaps)) / outcome.total * 1e3:,.0f}",
        f"{outcome.total / 1e3:.2f}",
        str(outcome.num_steps),
        f"{outcome.num_requests / outcome.num_steps:.0f}",
        f"{100 * outcome.num_padded / (outcome.num_padded + outcome.num_tokens):.1f}",
        f"{statistics.fmean(outcome.first):,.0f}",
        *(f"{_quantile(outcome.gaps, q):.1f}" for q in (0.5, 0.9, 0.99)),
    )


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[int(share * len(ascending))]


if __name__ == "__main__":
    main()
