"""Lets requests arrive at random at several data ranks, and prints how evenly their tokens are spread.

python scripts/simulate_balance.py --ranks 4 --load 0.8

The scheduler and the shapes are the real ones, the device is the formula of simulate_workload.py; a step takes as long
as on its busiest rank. Lengths are those of a workload, arrivals Poisson, at a share of the rate at which requests end
when the line is never empty. Beside the scheduler of this project stands round-robin: a line for each rank.
"""

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from simulate_workload import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS, step_ms

from jaxllm.bench.workloads import workload_lengths
from jaxllm.engine.buckets import make_buckets
from jaxllm.scheduler.batch import RankBatch
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig

HEADER = ("placement", "tokens max/mean", "p99", "requests max/mean", "padding %", "TTFT ms", "p99", "out tok/s")


class Step(NamedTuple):
    """One step after the warm-up; lists are by rank."""

    milliseconds: float
    num_in_flight: list[int]  # tokens of the running requests
    num_running: list[int]
    num_tokens: int
    num_padded: int
    num_finished: int
    waited: list[float]  # from arrival to the first token, of those that got theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", default="W2")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--load", type=float, default=0.8, help="arrivals, as a share of what the ranks can serve")
    parser.add_argument("--max-num-seqs", type=int, default=256, help="of each rank")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--num-blocks", type=int, default=NUM_BLOCKS, help="of each rank")
    parser.add_argument("--warm-up", type=int, default=1500, help="steps before the first that counts")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    simulation = Simulation(args)
    capacity = simulation.capacity()
    rows: list[tuple[str, ...]] = [HEADER]
    for name, is_joint in (("this scheduler", True), ("round-robin", False)):
        rows.append(table_row(name, list(simulation.run(is_joint, capacity * args.load))))
    print(
        f"{args.workload} on {args.ranks} ranks: {capacity * 1e3:.1f} requests a second at most, {args.load:.0%} come"
    )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")


class Simulation:
    """Ranks in lockstep, fed from one line or from a line for each."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._lengths = workload_lengths(args.workload)
        self._buckets = make_buckets(
            args.max_num_seqs, args.max_num_batched_tokens, MAX_MODEL_LEN // BLOCK_SIZE, coarse=False
        )
        self._config = SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=False,
            step_sizes=self._buckets.fillable,
        )

    def capacity(self) -> float:
        """Gives the requests that end in a millisecond when there are always some that wait."""
        steps = list(self.run(True, float("inf")))
        return sum(step.num_finished for step in steps) / sum(step.milliseconds for step in steps)

    def run(self, is_joint: bool, rate: float) -> Iterator[Step]:
        """Gives the steps after the warm-up; `rate` is the requests that arrive in a millisecond."""
        args, rng = self._args, random.Random(0)
        pools = [BlockPool(args.num_blocks, BLOCK_SIZE) for _ in range(args.ranks)]
        groups = [pools] if is_joint else [[pool] for pool in pools]
        schedulers = [Scheduler(self._config, group, KVGroups()) for group in groups]
        arrival: dict[str, float] = {}
        numbers, now, due = count(), 0.0, 0.0
        for step in range(args.warm_up + args.steps):
            while due <= now if rate < float("inf") else any(each.num_waiting < 64 for each in schedulers):
                number = next(numbers)
                num_prompt, num_output = self._lengths[number % len(self._lengths)]
                arrival[str(number)] = due
                schedulers[number % len(schedulers)].add(Request(str(number), [0] * num_prompt, num_output))
                due = due + rng.expovariate(rate) if rate < float("inf") else now
            batches = [scheduler.schedule() for scheduler in schedulers]
            parts = [part for batch in batches for part in (batch.ranks if batch else [RankBatch()])]
            num_tokens = [part.num_tokens for part in parts]
            if not any(num_tokens):
                now = due
                continue
            shape = self._buckets.shape(
                max(num_tokens),
                max(len(part.items) for part in parts),
                1,
                "greedy",
                is_mixed=any(part.num_tokens != len(part.items) for part in parts),
            )
            spent = max(step_ms(shape, part) for part in parts)
            now += spent
            in_flight, running = self._loads(schedulers)
            waited, num_finished = [], 0
            for scheduler, batch in zip(schedulers, batches, strict=True):
                for update in scheduler.update(batch, [7] * len(batch.items)) if batch else ():
                    num_finished += update.finish_reason is not None
                    if update.num_output_tokens == 1:
                        waited.append(now - arrival[update.request_id])
            if step >= args.warm_up:
                padded = shape.num_tokens * len(parts) - sum(num_tokens)
                yield Step(spent, in_flight, running, sum(num_tokens), padded, num_finished, waited)

    def _loads(self, schedulers: Sequence[Scheduler]) -> tuple[list[int], list[int]]:
        in_flight, running = [0] * self._args.ranks, [0] * self._args.ranks
        for index, scheduler in enumerate(schedulers):
            for request in scheduler.living.values():
                if request.status is RequestStatus.RUNNING:
                    rank = index + (request.data_rank or 0)
                    in_flight[rank] += request.num_tokens
                    running[rank] += 1
        return in_flight, running


def imbalance(steps: Sequence[Step]) -> float:
    """Gives the mean over time of the busiest rank's tokens in flight, as a multiple of the mean of all ranks."""
    total = sum(step.milliseconds for step in steps)
    return sum(step.milliseconds * _over_mean(step.num_in_flight) for step in steps) / total


def _over_mean(loads: Sequence[int]) -> float:
    return max(loads) * len(loads) / max(sum(loads), 1)


def table_row(name: str, steps: Sequence[Step]) -> tuple[str, ...]:
    """Gives a row of the table."""
    total = sum(step.milliseconds for step in steps)
    of_requests = sum(step.milliseconds * _over_mean(step.num_running) for step in steps) / total
    waited = sorted(one for step in steps for one in step.waited)
    num_padded, num_tokens = sum(step.num_padded for step in steps), sum(step.num_tokens for step in steps)
    ratios = sorted(_over_mean(step.num_in_flight) for step in steps)
    return (
        name,
        f"{imbalance(steps):.3f}",
        f"{ratios[int(0.99 * len(ratios))]:.3f}",
        f"{of_requests:.3f}",
        f"{100 * num_padded / (num_padded + num_tokens):.1f}",
        f"{statistics.fmean(waited):.1f}",
        f"{waited[int(0.99 * len(waited))]:.1f}",
        f"{sum(sum(step.num_running) for step in steps) / total * 1e3:,.0f}",
    )


if __name__ == "__main__":
    main()
