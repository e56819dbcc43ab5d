"""Times the kernels on one GPU, as shares of its copy bandwidth and matmul peak, and prints one table.

python scripts/bench_kernels.py --sweep --json kernels.json

A case is timed by many calls inside one compiled program, each on a layer of its own, so that no cache helps; the
number is the median over several rounds of such programs. With --sweep, several sets of constants are tried per case.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from jaxllm.kernels.e4m3.reference import E4M3, narrow
from jaxllm.kernels.launch import capability
from jaxllm.kernels.matmul import reference as xla_gemm
from jaxllm.kernels.matmul import tuned
from jaxllm.kernels.matmul.choice import Stack
from jaxllm.kernels.paged_attention import mosaic
from jaxllm.kernels.paged_attention.mosaic_prefill import MosaicConfig, choose_config
from jaxllm.kernels.paged_attention.triton import attend
from jaxllm.kernels.paged_attention.tuning import DecodeConfig, PrefillConfig, decode_config, prefill_config
from jaxllm.kernels.rope_kv_write.triton import RopeConfig, turn_and_write
from jaxllm.kernels.sampling import reference
from jaxllm.kernels.sampling.triton import SampleConfig, choose_with

N, K, H = 32, 8, 128  # the heads of an 8B Llama
DTYPE = jnp.dtype(jnp.bfloat16)
SCALE = H**-0.5
THREADS = 8  # compile at once


@dataclass(frozen=True, slots=True)
class Case:
    """A batch: request b brings new[b] tokens, the last of its context[b]. `calls` run in one program."""

    name: str
    new: tuple[int, ...]
    context: tuple[int, ...]
    block_size: int
    calls: int
    cache_dtype: jnp.dtype = DTYPE

    @property
    def is_decode(self) -> bool:
        return set(self.new) == {1}

    @property
    def num_bytes(self) -> int:
        """Keys and values that have to be read."""
        return sum(self.context) * 2 * K * H * self.cache_dtype.itemsize

    @property
    def num_flops(self) -> int:
        """Of the two products over the pairs of token and key that causality allows."""
        pairs = sum(n * c - n * (n - 1) // 2 for n, c in zip(self.new, self.context, strict=True))
        return 4 * pairs * N * H


@dataclass(slots=True)
class Row:
    """One set of constants of one version in one case."""

    case: str
    version: str
    config: str
    micros: float | None = None
    rate: str = ""
    share: float | None = None
    error: float | None = None  # relative, against the first constants
    note: str = ""
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card can do, measured in the same run: bytes a second of a copy, FLOPs a second of a matrix product."""

    copy: float
    matmul: float


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


def attention_cases(shrink: int) -> list[Case]:
    def even(count: int, length: int) -> tuple[int, ...]:
        return (max(1, length // shrink),) * max(1, count // shrink)

    def decode(name: str, context: tuple[int, ...], calls: int, cache_dtype: jnp.dtype = DTYPE) -> Case:
        return Case(name, (1,) * len(context), context, 16, calls, cache_dtype)

    cases = [
        decode("decode 256x1024", even(256, 1024), 12),
        decode("decode 32x8192", even(32, 8192), 12),
        decode("decode 255x256 + 1x60000", (*even(255, 256), 60_000 // shrink), 16),
        decode("decode 1x8192", even(1, 8192), 48),
        decode("decode fp8 256x1024", even(256, 1024), 24, E4M3),
        decode("decode fp8 32x8192", even(32, 8192), 24, E4M3),
        Case("prefill fp8 1x8192, block 16", even(1, 8192), even(1, 8192), 16, 6, E4M3),
    ]
    for block_size in (64, 16):
        for name, new, context in (
            ("1x8192", even(1, 8192), even(1, 8192)),
            ("8x1024", even(8, 1024), even(8, 1024)),
            ("64x128 on 2000", even(64, 128), tuple(n + 2000 // shrink for n in even(64, 128))),
        ):
            cases.append(Case(f"prefill {name}, block {block_size}", new, context, block_size, 6))
    cases.append(Case("prefill 1x8192, block 128", even(1, 8192), even(1, 8192), 128, 6))
    # The smallest batch that takes the kernel for large prefill.
    cases.append(Case("prefill 1x256 on 3840, block 16", even(1, 256), even(1, 4096), 16, 12))
    return cases


@dataclass(frozen=True, slots=True)
class Runs:
    """A case with its constants to try, the default of each version first, and the programs that time them."""

    name: str
    configs: list[Any]
    make: Callable[[], tuple[Any, ...]]
    program: Callable[[Any], Callable]
    calls: int
    cost: Callable[[Ceilings], tuple[float, float, str]]  # amount of a call, the ceiling of its rate, its unit
    donates: bool = False
    num_defaults: int = 1


def attention_runs(case: Case) -> Runs:
    few, many = decode_config(H, DTYPE, case.cache_dtype), prefill_config(H, DTYPE, case.cache_dtype)
    configs: list[DecodeConfig | PrefillConfig | MosaicConfig]
    num_defaults = 1
    if case.is_decode:
        tiles = [
            (64, 4, 3),
            (64, 4, 4),
            (32, 2, 4),
            (64, 2, 3),
            (64, 2, 4),
            (64, 4, 5),
            (128, 4, 3),
            (32, 4, 4),
            (32, 2, 6),
        ]
        splits = [(128, 2048), (128, 1024), (128, 4096), (256, 2048), (512, 2048), (64, 2048), (64, 1024)]
        if case.cache_dtype == E4M3:
            tiles = [(32, 2, 4), (32, 2, 6), (64, 2, 4), (64, 4, 4), (32, 1, 5), (32, 4, 5), (64, 2, 3), (16, 1, 6)]
        configs = [few]
        configs += [DecodeConfig(*tile, few.min_chunk, few.num_programs) for tile in tiles]
        configs += [DecodeConfig(*tile, *split) for split in splits for tile in tiles[:4]]
    else:
        tiles = [(128, 128, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3)]
        tiles += [(128, 32, 8, 4), (256, 64, 8, 3), (64, 64, 4, 4), (64, 128, 8, 3), (128, 64, 8, 2), (64, 32, 4, 4)]
        configs = [many, *(PrefillConfig(*tile) for tile in tiles)]
        if capability() == 90:  # the Mosaic version is for Hopper alone
            configs = [choose_config(H), many, MosaicConfig(64, 4), MosaicConfig(64, 3), *configs]
            num_defaults = 2

    def program(config):
        constants = (config, many) if isinstance(config, DecodeConfig) else (few, config)
        attend_with = functools.partial(attend, *constants)
        if isinstance(config, MosaicConfig):
            attend_with = functools.partial(mosaic.attend, config)

        def run(query, kv_cache, table, start, length):
            # Each call's queries are the last one's result: none can begin before the other ends.
            for layer in range(case.calls):
                query = attend_with(query, kv_cache, layer, table, start, length, SCALE)
            return query

        return run

    def cost(ceilings: Ceilings) -> tuple[float, float, str]:
        if case.is_decode:
            return case.num_bytes, ceilings.copy, "TB/s"
        return case.num_flops, ceilings.matmul, "TFLOP/s"

    make = functools.partial(attention_inputs, case)
    return Runs(case.name, unique(configs), make, program, case.calls, cost, num_defaults=num_defaults)


def attention_inputs(case: Case) -> tuple[jax.Array, ...]:
    """Random tensors on the device; the blocks of all requests are scattered over the pool."""
    rng = np.random.default_rng(0)
    per_request = [-(-length // case.block_size) for length in case.context]
    blocks = rng.permutation(np.arange(1, sum(per_request) + 1))
    table = np.zeros((len(case.context), max(per_request)), np.int32)
    ends = np.cumsum(per_request)
    for b, (end, count) in enumerate(zip(ends, per_request, strict=True)):
        table[b, :count] = blocks[end - count : end]
    shape = (case.calls, sum(per_request) + 1, 2, K, case.block_size, H)
    query = jax.jit(lambda key: jax.random.normal(key, (sum(case.new), N, H), DTYPE))(jax.random.key(1))
    fill = jax.jit(lambda key: narrow(jax.random.normal(key, shape[1:], DTYPE), case.cache_dtype))
    kv_cache = jnp.stack([fill(key) for key in jax.random.split(jax.random.key(2), case.calls)])
    start = np.concatenate([[0], np.cumsum(case.new)])
    return (
        query,
        kv_cache,
        jnp.asarray(table),
        jnp.asarray(start, jnp.int32),
        jnp.asarray(case.context, jnp.int32),
    )


def rope_runs(num_tokens: int) -> Runs:
    layers, block_size, projections = 12, 16, 4
    configs = [RopeConfig(), *(RopeConfig(*c) for c in ((8, 4), (16, 4), (32, 4), (32, 8), (64, 8), (16, 2), (8, 2)))]

    def make() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(3), 3)
        shape = (projections, num_tokens, K, N // K + 2, H)
        qkv = jax.jit(lambda key: jax.random.normal(key, shape, DTYPE))(keys[0])
        angle = jax.random.uniform(keys[1], (num_tokens, H // 2)) * 100
        slot = jax.random.permutation(keys[2], num_tokens).astype(jnp.int32) + block_size
        num_blocks = num_tokens // block_size + 2
        kv_cache = jnp.zeros((layers, num_blocks, 2, K, block_size, H), DTYPE)
        return kv_cache, *qkv, jnp.cos(angle), jnp.sin(angle), slot // block_size, slot % block_size

    def program(config: RopeConfig):
        def run(kv_cache, *rest):
            *qkv, cos, sin, block, offset = rest
            queries = []
            for layer in range(layers):
                query, kv_cache = turn_and_write(
                    config, kv_cache, layer, qkv[layer % projections], cos, sin, block, offset
                )
                queries.append(query)
            return kv_cache, jnp.stack([query[-1] for query in queries])

        return run

    rows, half = num_tokens * K * (N // K + 2) * H, num_tokens * H // 2
    num_bytes = 2 * rows * 2 + 2 * half * 4
    return Runs(
        f"rope + KV write, {num_tokens} tokens",
        unique(configs),
        make,
        program,
        layers,
        lambda ceilings: (num_bytes, ceilings.copy, "TB/s"),
        donates=True,
    )


@dataclass(frozen=True, slots=True)
class Plain:
    """Stands for the constants of the plain version, which has none."""


def sampler_runs(shrink: int) -> Iterator[Runs]:
    """Cases of choosing tokens; the share is that of one pass over the logits at copy bandwidth."""
    V = 128_256 // shrink
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("full", 256, {"rules": True, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "num_best": 8}),
        ("plain", 256, {}),
        ("filters", 256, {"top_k": 50, "top_p": 0.9}),
        ("logprobs", 256, {"num_best": 8}),
        ("top_p", 256, {"top_p": 0.9}),
        ("top_p, flat", 256, {"top_p": 0.9, "is_flat": True}),
        ("full", 8, {"rules": True, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "num_best": 8}),
    ]
    scans = [(2048, 4), (4096, 8), (1024, 4), (4096, 4), (2048, 8)]
    lists = [(1024, 8, 2048, 8), (1024, 16, 2048, 16), (512, 8, 1024, 8), (2048, 8, 4096, 8)]
    configs = [SampleConfig(), *(SampleConfig(*scan, *lists[0]) for scan in scans)]
    configs += [SampleConfig(*scans[0], *others) for others in lists]
    for name, B, options in cases:
        rows = max(1, B // shrink)
        yield sampler_run(f"sampler {name} {rows}x{V}", configs, rows, V, **options)
    for name, B, options in cases[:4]:
        rows = max(1, B // shrink)
        yield sampler_run(f"sampler {name} {rows}x{V}, plain XLA", [Plain()], rows, V, **options)


def sampler_run(
    name: str,
    configs: list,
    B: int,
    V: int,
    rules: bool = False,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num_best: int | None = None,
    is_flat: bool = False,
) -> Runs:
    calls, buffers = 4, 2

    def make() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(4), 4)
        # Zipf's law in a random order, as of a text; or normal, with much of the vocabulary in the nucleus.
        uniform = jax.jit(lambda key: -1.5 * jnp.log(1 + V * jax.random.uniform(key, (B, V))))
        normal = jax.jit(lambda key: jax.random.normal(key, (B, V)))
        logits = [(normal if is_flat else uniform)(key) for key in jax.random.split(keys[0], buffers)]
        occurs = jax.random.uniform(keys[1], (B + 1, V)) < 0.01
        counts = jnp.where(occurs, jax.random.randint(keys[2], (B + 1, V), 0, 4), 0)
        counts |= jnp.where(occurs, reference.IN_PROMPT, 0)
        return *logits, counts, jax.random.bits(keys[3], (B, 2), jnp.uint32)

    def program(config: SampleConfig | Plain):
        def run(*arrays):
            *logits, counts, seed = arrays
            strengths = [jnp.full(B, value, jnp.float32) for value in (1.1, 0.2, 0.1)]
            penalties = reference.Penalties(counts, jnp.arange(B), *strengths) if rules else None
            filters = None
            if top_k or top_p < 1 or min_p:
                numbers = (jnp.full(B, top_p, jnp.float32), jnp.full(B, min_p, jnp.float32))
                filters = reference.Filters(jnp.full(B, top_k), *numbers)
            heat, token, told = jnp.full(B, 0.8), jnp.zeros(B, jnp.int32), []
            for call in range(calls):
                # Each call's position is the last one's token: none can begin before the other ends.
                drawing = (logits[call % buffers], heat, seed, token)
                given = {"penalties": penalties, "filters": filters, "num_best": num_best, "as_logprobs": True}
                if isinstance(config, Plain):
                    token, scores = reference.choose(*drawing, **given)
                else:
                    token, scores = choose_with(config, *drawing, logits=None, mask=None, edits=None, **given)
                told += [token, *([] if scores is None else (scores.rank, *scores.best_token.T))]
            return jnp.stack(told)

        return run

    return Runs(name, unique(configs), make, program, calls, lambda ceilings: (4 * B * V, ceilings.copy, "TB/s"))


@dataclass(frozen=True, slots=True)
class Multiplier:
    """Who multiplies: the version that goes by the device's table, or the reference, which is XLA's GEMM."""

    version: str


def matmul_runs(shrink: int) -> Iterator[Runs]:
    """The four products of an 8B Llama's layer, each of what the one before gave, and the head's by itself."""
    D, F, V = 4096 // shrink, 14336 // shrink, 128256 // shrink
    layers, head = {"qkv": (D, 6144 // shrink), "o": (D, D), "gate_up": (D, 2 * F), "down": (F, D)}, {"head": (V, D)}
    for num_rows in (1, 8, 64, 128, 256, 512):
        for name, calls, shapes in (("layer", 4, layers), ("head", 2, head)):
            yield Runs(
                f"matmul 8B {name} M={num_rows}",
                [Multiplier("tuned"), Multiplier("reference")],
                functools.partial(matmul_inputs, num_rows, D, calls, shapes),
                matmul_program,
                calls,
                functools.partial(matmul_cost, num_rows, list(shapes.values())),
            )


def matmul_inputs(
    num_rows: int, D: int, calls: int, shapes: dict[str, tuple[int, int]]
) -> tuple[jax.Array | dict[str, jax.Array], ...]:
    def draw(key, shape: tuple[int, ...]) -> jax.Array:
        return jax.jit(lambda key: jax.random.normal(key, shape, DTYPE) * D**-0.5)(key)

    keys = jax.random.split(jax.random.key(4), len(shapes))
    weights = {name: draw(key, (calls, *shapes[name])) for key, name in zip(keys, shapes, strict=True)}
    return draw(jax.random.key(5), (num_rows, D)) * D**0.5, weights


def matmul_program(config: Multiplier) -> Callable:
    matmul = tuned.matmul if config.version == "tuned" else xla_gemm.matmul

    def run(x, weights):
        def multiply(x, name, layer, transposed=False):
            return matmul(x, weights[name][layer], transposed=transposed, stack=Stack(weights[name], layer))

        D = x.shape[1]
        for layer in range(len(next(iter(weights.values())))):
            if "head" in weights:
                x = multiply(x, "head", layer, transposed=True)[:, :D]
                continue
            attended = multiply(multiply(x, "qkv", layer)[:, :D], "o", layer)
            gate, up = jnp.split(multiply(attended, "gate_up", layer), 2, axis=1)
            x = x + multiply(jax.nn.silu(gate) * up, "down", layer)
        return x

    return run


def matmul_cost(num_rows: int, shapes: list[tuple[int, int]], ceilings: Ceilings) -> tuple[float, float, str]:
    """Bytes of weights, rows and results; the ceiling is what both memory and the tensor cores allow."""
    num_bytes = [(a * b + num_rows * (a + b)) * DTYPE.itemsize for a, b in shapes]
    seconds = [
        max(size / ceilings.copy, 2 * num_rows * a * b / ceilings.matmul)
        for size, (a, b) in zip(num_bytes, shapes, strict=True)
    ]
    return sum(num_bytes), sum(num_bytes) / sum(seconds), "TB/s"


def measure(run: Runs, ceilings: Ceilings, sweep: bool, until: float, rounds: int) -> Iterator[Row]:
    """Gives the rows of a case, printing each; constants that do not compile or run get a note instead of a time."""
    arrays = run.make()
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
    configs = run.configs if sweep else run.configs[: run.num_defaults]
    expected: np.ndarray | None = None
    with ThreadPoolExecutor(THREADS) as pool:
        # The defaults are always tried.
        limits = [*[math.inf] * run.num_defaults, *[until] * (len(configs) - run.num_defaults)]
        programs = [pool.submit(compile_program, run, *pair, shapes) for pair in zip(configs, limits, strict=True)]
        for config, future in zip(configs, programs, strict=True):
            row = Row(run.name, "mosaic" if isinstance(config, MosaicConfig) else "triton", show(config))
            try:
                compiled = future.result()
                if compiled is None:
                    row.note = "not tried: no time left"
                else:
                    row.seconds, outcome, arrays = time_program(compiled, arrays, run.donates, rounds)
                    amount, ceiling, unit = run.cost(ceilings)
                    rate = amount * run.calls / statistics.median(row.seconds)
                    row.micros, row.share = amount / rate * 1e6, rate / ceiling
                    row.rate = f"{rate / 1e12:.{2 if unit == 'TB/s' else 0}f} {unit}"
                    expected = outcome if expected is None else expected
                    row.error = relative(outcome, expected)
            except Exception as error:  # whatever one set of constants does, the others go on
                row.note = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"
            print(line(row), flush=True)
            yield row


def compile_program(run: Runs, config, until: float, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> Compiled | None:
    """Gives the compiled program, or None when it is too late to begin."""
    if time.perf_counter() > until:
        return None
    return jax.jit(run.program(config), donate_argnums=(0,) if run.donates else ()).lower(*shapes).compile()


def time_program(
    compiled: Compiled, arrays: tuple[jax.Array, ...], donates: bool, rounds: int, queued: int = 3
) -> tuple[list[float], np.ndarray, tuple[jax.Array, ...]]:
    """Gives the seconds of a program in each round of `queued` in a row, the last outcome, and the arrays after it."""
    seconds = []
    outcome = None
    for n in range(rounds + 2):
        begin = time.perf_counter()
        for _ in range(queued):
            outcome = compiled(*arrays)
            if donates:
                arrays, outcome = (outcome[0], *arrays[1:]), outcome[1]
        jax.block_until_ready(outcome)
        if n >= 2:
            seconds.append((time.perf_counter() - begin) / queued)
    return seconds, np.asarray(outcome, np.float32), arrays


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    if not np.isfinite(found).all():
        return float("nan")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def measure_ceilings(shrink: int) -> Ceilings:
    """Copies 2 GiB and multiplies 8192 x 8192 matrices of random numbers."""

    def seconds(function: Callable, *arrays: jax.Array) -> float:
        compiled = jax.jit(function).lower(*arrays).compile()
        times = []
        for n in range(9):
            begin = time.perf_counter()
            jax.block_until_ready([compiled(*arrays) for _ in range(4)])
            if n >= 2:
                times.append((time.perf_counter() - begin) / 4)
        return statistics.median(times)

    x = jax.random.normal(jax.random.key(0), ((1 << 29) // shrink**2,), jnp.float32)
    copy = 2 * x.nbytes / seconds(lambda x: x * 1.0001, x)
    del x
    size = 8192 // shrink
    a, b = (jax.random.normal(jax.random.key(n), (size, size), DTYPE) for n in (1, 2))
    return Ceilings(copy, 2 * size**3 / seconds(jnp.matmul, a, b))


def unique(configs: list) -> list:
    return list(dict.fromkeys(configs))


type Config = DecodeConfig | PrefillConfig | MosaicConfig | RopeConfig | SampleConfig | Plain | Multiplier


def show(config: Config) -> str:
    return ", ".join(f"{name.name} {getattr(config, name.name)}" for name in dataclasses.fields(config))


def line(row: Row) -> str:
    if row.micros is None:
        return f"| {row.case:28} | {row.version} | {row.note} | {row.config} |"
    error = "" if row.error is None else f"{row.error:.1e}"
    speed = f"{row.micros:8.1f} us | {row.rate:>12} | {row.share:6.1%}"
    return f"| {row.case:28} | {row.version} | {speed} | {error} | {row.config} |"


def save(path: Path, ceilings: Ceilings, rows: list[Row]) -> None:
    content = {
        "command": sys.argv,
        "commit": commit(),
        "device": jax.devices()[0].device_kind,
        "ceilings": dataclasses.asdict(ceilings),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path.write_text(json.dumps(content, indent=1))


def commit() -> str:
    """The short hash of the checkout, with a mark if it has changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
