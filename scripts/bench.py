"""Measures workloads on the engine in this process and prints one table with its command, commit and device.

python scripts/bench.py --workloads L1,L8 --model llama-3.1-8b --load-format dummy --max-model-len 4096
"""

import argparse
import subprocess
import sys
import time

import jax

from jaxllm import LLM
from jaxllm.bench.offline import HEADER, measure
from jaxllm.config.errors import InputError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--workloads", default="L1,L8", help="comma-separated: L1, L8, W1, W2, W3")
    parser.add_argument("--limit", type=int, default=None, help="only the first so many requests of each")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--max-num-batched-tokens", type=int, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    options = {k: v for k, v in vars(args).items() if k not in ("workloads", "limit")}
    options["enable_prefix_caching"] = False  # as in the comparison: the workloads share no prefix
    start = time.perf_counter()
    try:
        llm = LLM(**options)
    except InputError as error:
        sys.exit(f"error: {error}")
    print(f"command: {' '.join(sys.argv)}\ncommit:  {commit()}\ndevice:  {jax.devices()[0].device_kind}", flush=True)
    print(f"start:   {time.perf_counter() - start:.1f} s")
    for label, value in llm.report():
        print(f"         {label}: {value}")
    vocab = llm.vocab_size
    rows = [HEADER]
    for name in args.workloads.split(","):
        rows.append(measure(llm, name, args.limit, vocab).row())
        print("measured", *rows[-1], flush=True)
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def commit() -> str:
    """The short hash of the checkout, with a mark if it has changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
