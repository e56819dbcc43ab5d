"""Times the kernels on one GPU, as shares of its copy bandwidth and matmul peak, and prints one table.

python scripts/bench_kernels.py --sweep --json kernels.json

A case is timed by many calls inside one compiled program, each on a layer of its own, so that no cache helps; the
number is the median over several rounds of such programs, by the device's clock. With --sweep, several sets of
constants are tried per case.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
from kernel_bench.attention import attention_cases, attention_runs
from kernel_bench.matmul import matmul_runs
from kernel_bench.rope import rope_runs
from kernel_bench.sampler import sampler_runs
from kernel_bench.timing import Row, line, measure

from jaxllm.bench.ceilings import Ceilings, measure_ceilings
from jaxllm.environment import keep_command_buffers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sweep", action="store_true", help="try several constants for each case")
    parser.add_argument("--seconds-per-case", type=float, default=30, help="no new constants of a case after that")
    parser.add_argument(
        "--seconds", type=float, default=300, help="no new constants but each case's default after that"
    )
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--json", type=Path, help="write every row there too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shrink", type=int, default=1, help="divides every size, to try the script itself")
    args = parser.parse_args()
    keep_command_buffers(os.environ)
    print(f"command: {' '.join(sys.argv)}\ncommit:  {commit()}\ndevice:  {jax.devices()[0].device_kind}", flush=True)
    deadline = time.perf_counter() + args.seconds
    ceilings = measure_ceilings(args.shrink)
    print(f"copy {ceilings.copy / 1e12:.2f} TB/s, bf16 matmul {ceilings.matmul / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[Row] = []
    attention = map(attention_runs, attention_cases(args.shrink))
    others = [rope_runs(8192 // args.shrink), *sampler_runs(args.shrink), *matmul_runs(args.shrink)]
    for run in [*attention, *others]:
        if args.only in run.name:
            until = min(deadline, time.perf_counter() + args.seconds_per_case)
            rows += measure(run, ceilings, args.sweep, until, args.rounds)
            if args.json:
                save(args.json, ceilings, rows)
    print("\nbest of each case")
    for _, group in itertools.groupby(rows, key=lambda row: row.case):
        timed = [row for row in group if row.micros is not None]
        if timed:
            print(line(timed[0]) + "   default")
            print(line(min(timed, key=lambda row: row.micros or 0.0)), flush=True)


def save(path: Path, ceilings: Ceilings, rows: list[Row]) -> None:
    content = {
        "command": sys.argv,
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
        "ceilings": ceilings._asdict(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1))


def commit() -> str:
    """The short hash of the checkout, with a mark if it has changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
