"""Serves W2's lengths over and over in this process, and tells what memory did between two points of the run.

python scripts/soak.py --model qwen3-0.6b --load-format dummy --hf-overrides '{"num_hidden_layers": 2}'

Live device bytes must be equal at both points, and the host's resident memory may grow by less than --most-growth: the
exit status says so. Both are read when no request runs.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path

import jax

from jaxllm.bench.own_engine import OwnEngine
from jaxllm.bench.workloads import folded, workload
from jaxllm.config.engine_args import EngineArgs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--hf-overrides", type=json.loads, default=None, help="JSON object merged into config.json")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--num-gpu-blocks-override", type=int, default=None)
    parser.add_argument("--from-request", type=int, default=2000)
    parser.add_argument("--to-request", type=int, default=20000)
    parser.add_argument("--most-growth", type=float, default=50.0, help="MB of host memory")
    args = parser.parse_args()

    engine = OwnEngine(
        EngineArgs(
            model=args.model,
            load_format=args.load_format,
            hf_overrides=args.hf_overrides,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            num_gpu_blocks_override=args.num_gpu_blocks_override,
        )
    )
    readings, start, served = {}, time.perf_counter(), 0
    for repeat in range(-(-args.to_request // 1000)):
        requests = folded(workload("W2", repeat=repeat), engine.vocab_size)
        requests = [r for r in requests if len(r.prompt) + r.output_len <= engine.max_model_len]
        run = engine.run(requests, lambda ended: None)
        served += 1000
        tokens = sum(map(len, run.outputs))
        del run, requests
        if served in (args.from_request, args.to_request):
            readings[served] = live_device_bytes(), resident_bytes()
            device, host = readings[served]
            print(f"{served} requests: {device:,} live device bytes, {host / 1e6:,.1f} MB resident", flush=True)
        else:
            print(f"{served} requests, {time.perf_counter() - start:.0f} s, {tokens:,} tokens in the last", flush=True)
    engine.close()
    (device_before, host_before), (device_after, host_after) = readings.values()
    growth = (host_after - host_before) / 1e6
    print(f"live device bytes: {device_after - device_before:+,}; host memory: {growth:+.1f} MB")
    return 0 if device_after == device_before and growth < args.most_growth else 1


def live_device_bytes() -> int:
    """Bytes of all arrays that exist, and on a GPU what its allocator has lent."""
    gc.collect()
    lent = jax.local_devices()[0].memory_stats()
    return lent["bytes_in_use"] if lent else sum(array.nbytes for array in jax.live_arrays())


def resident_bytes() -> int:
    """Of this process, as the kernel counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


if __name__ == "__main__":
    sys.exit(main())
