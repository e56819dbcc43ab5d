"""Runs a small case of every GPU kernel under compute-sanitizer's memcheck, and prints one line for each.

python scripts/sanitize_kernels.py

The kernels run one by one outside of any jit, and every array is an allocation of its own. The last case writes far
beyond the cache on purpose: it must be found, or nothing else would be. A write just behind the cache was not found on
an H200, padding or not; there the tests look, with poisoned pools and results.
Exit status: 0 all clean, 1 a kernel is not, 2 there is no compute-sanitizer, 3 it refuses this device.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGIN = "@@ "  # before a case's name, on a line of its own
PLANTED = "a write far beyond the cache, planted"
FAR = 1 << 21  # blocks: gigabytes, where nothing is
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
REFUSED = "Device not supported"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--plain", action="store_true", help="run the cases without compute-sanitizer")
    parser.add_argument("--only", default="", help="run the cases that have this in their name")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # what the sanitizer runs
    args = parser.parse_args()
    if args.plain or args.inside:
        run_cases(args.only, planted=args.inside)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or next((p for p in PLACES if Path(p).exists()), None)
    if sanitizer is None:
        print(f"compute-sanitizer is neither on the PATH nor at {' or '.join(PLACES)}: nothing was checked")
        return 2
    start = time.perf_counter()
    output = check(sanitizer, args.only)
    if REFUSED in output:
        print(f"compute-sanitizer refuses this device ({REFUSED}): nothing was checked")
        return 3
    return report(output, time.perf_counter() - start)


def check(sanitizer: str, only: str) -> str:
    """Gives what a run of all cases under memcheck printed."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    options = ("--tool", "memcheck", "--padding", str(1 << 20), "--report-api-errors", "no")
    options += ("--target-processes", "application-only")
    command = (sanitizer, *options, sys.executable, __file__, "--inside", "--only", only)
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return done.stdout


def report(output: str, seconds: float) -> int:
    """Prints a line for each case, and what was found in it."""
    before, *cases = output.split(BEGIN)
    if not cases:
        print(f"no kernel ran:\n{before[-3000:]}")
        return 1
    is_clean, has_planted = True, False
    for case in cases:
        name, _, text = case.partition("\n")
        found = text.count("========= Invalid ")
        has_ended = "done in" in text
        if name == PLANTED:
            has_planted = found > 0
            print(f"{name}: {'found' if has_planted else 'NOT FOUND, so nothing above is proven'}")
            continue
        is_clean &= has_ended and not found
        ran = text.partition("done in")[2].partition("\n")[0].strip()
        print(f"{name}: {f'{found} invalid accesses' if found else 'clean'}{f', {ran}' if ran else ', DID NOT END'}")
        if found or not has_ended:
            print("\n".join(text.splitlines()[:20]))
    print(f"{len(cases)} cases in {seconds:.0f} s")
    return 0 if is_clean and has_planted else 1


def run_cases(only: str, planted: bool) -> None:
    cases = make_cases()
    if planted:
        cases[PLANTED] = lambda: write(80, "bfloat16", beyond=FAR)
    for name, run in cases.items():
        if only in name or name == PLANTED:
            print(f"{BEGIN}{name}", flush=True)
            start = time.perf_counter()
            try:
                block(run())
            except Exception as error:  # the sanitizer ends a kernel that it found something in
                print(f"raised {str(error).splitlines()[0]}", flush=True)
                if name != PLANTED:
                    raise
            print(f"done in {time.perf_counter() - start:.1f} s", flush=True)


def make_cases() -> dict[str, Callable[[], Any]]:
    """One or two small cases of each kernel, of sizes that fill no tile."""
    import jax

    from jaxllm.kernels.launch import capability

    cases: dict[str, Callable[[], Any]] = {
        "decode_chunks": lambda: attend("triton", (1, 1, 1), (1, 1100, 40), (7, 1), 80, "bfloat16"),
        "decode_chunks, float32 with sinks": lambda: attend(
            "triton", (1, 1), (150, 9), (4, 2), 64, "float32", sinks=True
        ),
        "decode_e4m3_chunks": lambda: attend("triton", (1, 1, 1), (1, 300, 40), (8, 2), 80, "bfloat16", e4m3=True),
        "prefill_tiles": lambda: attend("triton", (19, 1, 0), (150, 140, 0), (7, 1), 80, "bfloat16", window=100),
        "prefill_tiles, e4m3": lambda: attend("triton", (19, 1), (60, 140), (8, 2), 64, "float16", e4m3=True),
        "write_rows": lambda: write(80, "bfloat16"),
        "write_rows, e4m3": lambda: write(80, "float32", e4m3=True),
        "turn_rows": lambda: turn(96, 24, "bfloat16"),
        "turn_rows, e4m3": lambda: turn(80, 40, "float32", e4m3=True),
        "scan_logits": lambda: choose(4099, False),
        "scan_logits, draw_tokens, score_tokens": lambda: choose(4099, True),
        "multiply_few_rows": lambda: multiply_few(5, on_tensor_cores=True),
        "multiply_few_rows, one row": lambda: multiply_few(1, on_tensor_cores=False),
    }
    if jax.default_backend() == "gpu" and capability() == 90:
        cases["mosaic_prefill_tiles"] = lambda: attend("mosaic", (270, 1), (300, 140), (8, 2), 64, "bfloat16")
        cases["mosaic product"] = multiply_many
    return cases


def attend(
    version: str,
    new: tuple[int, ...],
    context: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    dtype: str,
    *,
    e4m3: bool = False,
    window: int | None = None,
    sinks: bool = False,
) -> Any:
    """Attention over a pool of exactly the blocks that are used; the last of them is the last one of the pool."""
    import importlib

    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxllm.kernels.paged_attention import triton, work_list

    # The lists of work are not what is checked, and compile quicker as a whole.
    static = ("max_new", "all_rows", "unit", "min_chunk", "num_extra", "num_kv_heads")
    triton.list_chunks = jax.jit(work_list.list_chunks, static_argnames=static)
    static = ("num_tokens", "min_new", "tile", "align")
    triton.list_tiles = jax.jit(work_list.list_tiles, static_argnames=static)
    (N, K), C = heads, 16
    count = [-(-length // C) for length in context]
    table = np.zeros((len(context), max(count)), np.int32)
    last = sum(count)
    for b, blocks in enumerate(count):
        table[b, :blocks] = np.arange(last, last - blocks, -1)
        last -= blocks
    num_tokens = len(new) if set(new) == {1} else -(-sum(new) // 8) * 8
    pool = filled((1, sum(count) + 1, 2, K, C, head_dim), "uint8" if e4m3 else dtype)
    start = jnp.asarray(np.concatenate([[0], np.cumsum(new)]), jnp.int32)
    attention = importlib.import_module(f"jaxllm.kernels.paged_attention.{version}").paged_attention
    query = filled((num_tokens, N, head_dim), dtype)
    options = {"scale": 0.1, "window": window, "sinks": filled((N,), "float32") if sinks else None}
    return attention(query, pool, 0, jnp.asarray(table), start, jnp.asarray(context, jnp.int32), **options)


def write(head_dim: int, dtype: str, *, e4m3: bool = False, beyond: int = 0) -> Any:
    """Writes 21 tokens to a cache, the last of them so many blocks beyond its last one."""
    import jax.numpy as jnp

    from jaxllm.kernels.kv_write.triton import kv_write

    slot = jnp.arange(21) + 11
    rows = filled((21, 3, head_dim), dtype)
    cache = filled((2, 4, 2, 3, 8, head_dim), "uint8" if e4m3 else dtype)
    return kv_write(cache, 1, rows, rows, (slot // 8).at[-1].add(beyond), slot % 8)


def turn(head_dim: int, num_pairs: int, dtype: str, *, e4m3: bool = False) -> Any:
    import jax.numpy as jnp

    from jaxllm.kernels.rope_kv_write.triton import rope_kv_write

    slot, turns = jnp.arange(21) + 11, filled((21, num_pairs), "float32")
    cache = filled((2, 4, 2, 3, 8, head_dim), "uint8" if e4m3 else dtype)
    norm, bias = filled((head_dim,), dtype), filled((3, 4, head_dim), dtype)
    options = {"bias": bias, "q_norm": norm, "k_norm": norm, "kv_scale": jnp.ones(2) if e4m3 else None, "eps": 1e-6}
    return rope_kv_write(cache, 1, filled((21, 3, 4, head_dim), dtype), turns, turns, slot // 8, slot % 8, **options)


def choose(vocab_size: int, is_filtered: bool) -> Any:
    import jax.numpy as jnp

    from jaxllm.kernels.sampling.reference import Filters, Penalties
    from jaxllm.kernels.sampling.triton import choose

    B = 3
    ones, row = jnp.ones(B), jnp.arange(B, dtype=jnp.int32)
    filters = Filters(jnp.asarray([5, 0, 300], jnp.int32), ones * 0.9, ones * 0.01)
    penalties = Penalties(jnp.zeros((B, vocab_size), jnp.int32), row, ones, ones * 0, ones * 0)
    options = {"filters": filters, "penalties": penalties, "num_best": 8} if is_filtered else {}
    return choose(filled((B, vocab_size), "float32"), ones, jnp.ones((B, 2), jnp.uint32), row, **options)


def multiply_few(num_rows: int, on_tensor_cores: bool) -> Any:
    from jaxllm.kernels.matmul.choice import FewRowsConfig, Stack
    from jaxllm.kernels.matmul.triton_few_rows import multiply

    config = FewRowsConfig(tile_in=32, split=3, on_tensor_cores=on_tensor_cores)
    return multiply(config, filled((num_rows, 168), "bfloat16"), Stack(filled((2, 168, 200), "bfloat16"), 1))


def multiply_many() -> Any:
    from jaxllm.kernels.matmul.choice import MosaicConfig, Stack
    from jaxllm.kernels.matmul.mosaic import multiply

    return multiply(MosaicConfig(), filled((128, 256), "bfloat16"), Stack(filled((2, 256, 512), "bfloat16"), 1))


def filled(shape: tuple[int, ...], dtype: str) -> Any:
    """Numbers between -1 and 1, or the same byte everywhere, in an allocation of its own."""
    import jax
    import numpy as np

    if dtype == "uint8":
        return jax.device_put(np.full(shape, 0x30, np.uint8))
    numbers = np.random.default_rng(0).uniform(-1, 1, size=shape)
    return jax.device_put(numbers.astype(jax.numpy.dtype(dtype)))


def block(result: Any) -> None:
    import jax

    jax.block_until_ready(result)


if __name__ == "__main__":
    sys.exit(main())
