"""Measures which kernel multiplies each matrix of a model fastest on this GPU, and writes the table that engines read.

python scripts/tune_kernels.py --seconds 90 --rows 1,8,64,256

Every product of a layer and the head's, at each number of rows: XLA's GEMM (cuBLASLt) against our Triton kernel and
jax's Mosaic kernel with several sets of constants. A program multiplies with the matrices of as many layers as exceed
the L2 cache several times over. All programs are compiled first, as far as the time goes, the likely ones before the
others; then they are timed one after the other, and their results compared with XLA's. A table that exists is
completed: what is measured again is replaced.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxllm.kernels.matmul.choice import TABLES, XLA, Choice, FewRowsConfig, MosaicConfig, Product, Stack, table_path
from jaxllm.kernels.matmul.tuned import multiply
from jaxllm.models.config import ModelConfig
from jaxllm.models.registry import find_family

SHAPES = Path(__file__).parents[1] / "jaxllm" / "models" / "shapes"
DTYPE = jnp.dtype(jnp.bfloat16)
THREADS = 12  # compile at once
DISTINCT_BYTES = 256 << 20  # of matrices that a program reads in turn: many times the L2 cache
PROGRAM_BYTES = 1600 << 20  # and in all: about as long as a call of a program takes on the host, several times
NUM_INPUTS = 11  # shares no divisor with a number of layers; each costs time on the host
GAIN = 0.97  # another kernel must take less than that share of XLA's time
MAX_ERROR = 1e-2  # relative to XLA's result
FEW = 64  # rows up to which a product costs reading the weights; what reads it then sums its parts
# Products as a step has them: kernels one after the other, cuBLASLt instead of XLA's Triton GEMMs.
OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_command_buffer": ""}


@dataclass(slots=True)
class Row:
    """One kernel with its constants for one product and number of rows."""

    product: Product
    num_rows: int
    choice: Choice
    micros: float | None = None
    error: float | None = None
    note: str = ""

    def describe(self) -> dict[str, Any]:
        config = {} if self.choice.config is None else {"config": dataclasses.asdict(self.choice.config)}
        return {"kernel": self.choice.kernel, **config}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="llama-3.1-8b", help="shapes of jaxllm/models/shapes, or a config.json")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rows", default="1,16,64,128,256,512", help="numbers of rows to measure, in this order")
    parser.add_argument("--seconds", type=float, default=300, help="no new program is compiled after 2/3 of it")
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the tables")
    parser.add_argument("--json", type=Path, help="write every row there too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shrink", type=int, default=1, help="divides every size, to try the script itself")
    args = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"command: {' '.join(sys.argv)}\ncommit:  {commit()}\ndevice:  {device}", flush=True)
    begin = time.perf_counter()
    products = list_products(read_shapes(args.model), args.tensor_parallel_size, args.shrink)
    numbers = [int(number) for number in args.rows.split(",")]
    rows = in_order_of_promise([list(candidates(product, n)) for n in numbers for product in products])
    measured = measure(rows, begin + args.seconds * 2 / 3, begin + args.seconds, args.rounds)
    print(f"{len(measured)} of {len(rows)} programs in {time.perf_counter() - begin:.0f} s")
    entries = summarize(measured, products, numbers)
    about = {"device": device, "command": " ".join(sys.argv), "commit": commit(), "jax": jax.__version__}
    write_table(table_path(device, args.tables), about, entries)
    if args.json:
        args.json.write_text(json.dumps(about | {"rows": [dataclasses.asdict(row) for row in measured]}, indent=1))


def read_shapes(model: str) -> ModelConfig:
    """The configuration of a model by its name or its config.json."""
    path = SHAPES / f"{model}.json"
    hf_config = json.loads((path if path.exists() else Path(model)).read_text())
    return find_family(hf_config)[1].configure(hf_config)


def list_products(cfg: ModelConfig, tensor_parallel_size: int, shrink: int = 1) -> list[Product]:
    """The matrices of a layer and of the head, as one tensor rank has them."""
    D, H, F, V = cfg.d_model // shrink, cfg.head_dim, cfg.d_ff // shrink, cfg.vocab_size // shrink
    N, K = cfg.num_q_heads // shrink, max(1, cfg.num_kv_heads // shrink)
    t = tensor_parallel_size
    sizes = [
        (D, (N + 2 * K) * H // t, False),
        (N * H // t, D, False),
        (D, (2 if cfg.gated_mlp else 1) * F // t, False),
        (F // t, D, False),
        (D, V // t, True),
    ]
    return [Product(*size, DTYPE.name) for size in dict.fromkeys(sizes)]


def candidates(product: Product, num_rows: int) -> Iterator[Row]:
    """XLA first, then the most promising constants of the others."""
    configs: list[FewRowsConfig | MosaicConfig] = []
    if num_rows <= 128:
        configs += few_rows_configs(product, num_rows)
    if num_rows >= 64:
        configs += mosaic_configs(product, num_rows)
    yield Row(product, num_rows, XLA)
    for config in dict.fromkeys(configs):
        if config.takes(product, num_rows):
            yield Row(product, num_rows, Choice("mosaic" if isinstance(config, MosaicConfig) else "triton", config))


def few_rows_configs(product: Product, num_rows: int) -> Iterator[FewRowsConfig]:
    """Tiles, each with parts for about two programs on each of 132 multiprocessors, and for four or for one."""
    # tile_in, tile_out, warps, stages, on tensor cores
    if num_rows > 16:
        tiles = [(64, 128, 8, 4, True), (64, 64, 4, 5, True), (128, 64, 4, 4, True)]
    elif product.transposed:
        tiles = [(128, 64, 4, 5, True), (64, 128, 4, 5, True), (256, 32, 4, 4, True), (128, 128, 8, 4, True)]
        tiles += [(64, 64, 4, 6, True)]
    else:
        tiles = [(128, 64, 4, 5, True), (64, 128, 4, 5, True), (128, 128, 8, 4, True), (256, 32, 4, 4, True)]
        tiles += [(64, 64, 4, 6, True), (64, 256, 8, 4, True)]
    if num_rows == 1:
        alone = [(512, 8), (256, 16), (1024, 8)] if product.transposed else [(64, 128), (32, 256), (32, 128)]
        tiles[1:1] = [(*tile, 4, 1, False) for tile in alone]
    for programs in (264, 528 if num_rows <= 16 else 132):
        for tile in tiles:
            tile_in, tile_out, *_ = tile
            split = 1
            while product.outputs // tile_out * split * 2 <= programs * 1.4 and product.inputs // split >= 4 * tile_in:
                split *= 2
            yield FewRowsConfig(tile_in, tile_out, split, *tile[2:])


def mosaic_configs(product: Product, num_rows: int) -> Iterator[MosaicConfig]:
    """Tiles of a warpgroup; small ones, where large ones would leave multiprocessors idle."""
    tiles = [(128, 128, True), (64, 64, True), (64, 128, True), (128, 64, True), (128, 128, False), (64, 128, False)]
    if num_rows <= 128:
        tiles = [(64, 64, True), (64, 128, True), (128, 64, True), (64, 64, False), (64, 128, False)]
    elif product.outputs > 16384:
        tiles = [(128, 128, True), (128, 128, False), (64, 256, False), (64, 128, True), (128, 64, True)]
    for tile_rows, tile_out, side_by_side in tiles:
        yield MosaicConfig(tile_rows, tile_out, 64, 4, side_by_side)


def in_order_of_promise(groups: list[list[Row]]) -> list[Row]:
    """XLA's of every group, then the first of every group that is another kernel's, then the second, and so on."""
    longest = max(map(len, groups))
    return [group[place] for place in range(longest) for group in groups if place < len(group)]


def measure(rows: list[Row], last_compile: float, last: float, rounds: int) -> list[Row]:
    """Gives the rows that were compiled in time and ran, with their times, printing each."""
    products = list(dict.fromkeys(row.product for row in rows))
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(compile_row, row, last_compile) for row in rows]
        weights = {product: draw_weights(product) for product in products}
        jax.block_until_ready(weights)
        programs = [future.result() for future in futures]
    print(f"compiled {sum(p is not None for p in programs)} programs", flush=True)
    measured = []
    expected: dict[tuple[Product, int], np.ndarray] = {}
    for row, program in zip(rows, programs, strict=True):
        if program is None and not row.note:
            continue
        if program is not None and time.perf_counter() < last:
            try:
                arguments = (weights[row.product], draw_inputs(row.product, row.num_rows))
                seconds, outcome = time_program(program, arguments, rounds)
                row.micros = seconds / num_calls(row.product) * 1e6
                row.error = compare(outcome, expected.setdefault((row.product, row.num_rows), outcome))
            except Exception as error:  # whatever one set of constants does, the others go on
                row.note = first_line(error)
        print(line(row), flush=True)
        measured.append(row)
    return measured


def compile_row(row: Row, last: float) -> Compiled | None:
    """Compiles a row's program; None where it does not compile, with a note, or when it is too late to begin."""
    if time.perf_counter() > last:
        return None
    try:
        return jax.jit(program_of(row)).lower(*abstract_arguments(row)).compile(compiler_options())
    except Exception as error:  # the same
        row.note = first_line(error)
        return None


def compiler_options() -> dict[str, bool | str] | None:
    return OPTIONS if jax.default_backend() == "gpu" else None


def program_of(row: Row) -> Callable:
    """Multiplies with one layer after the other, never at once; what few rows give is read by something cheap."""

    @jax.jit  # traced once, however often it is called
    def one(stacked: jax.Array, layer: jax.Array, weight: jax.Array, x: jax.Array) -> jax.Array:
        return multiply(row.choice, x, weight, transposed=row.product.transposed, stack=Stack(stacked, layer))

    def run(stacked: jax.Array, inputs: list[jax.Array]) -> list[jax.Array]:
        outcomes: list[jax.Array] = []
        for n in range(num_calls(row.product)):
            layer = n % len(stacked)
            # Without a barrier XLA would merge products of the same rows, or of the same matrix.
            x, *outcomes[-1:] = jax.lax.optimization_barrier((inputs[n % len(inputs)], *outcomes[-1:]))
            product = one(stacked, jnp.int32(layer), stacked[layer], x)
            if row.num_rows > FEW:
                outcomes.append(product)
            else:  # one result, as results cost time on the host
                outcomes = [sum(outcomes, jax.nn.silu(product))]
        return outcomes

    # A mesh, since Mosaic asks it for the number of multiprocessors.
    whole = PartitionSpec()
    return jax.shard_map(run, mesh=mesh(), in_specs=whole, out_specs=whole, check_vma=False)


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("device",))


def num_layers(product: Product) -> int:
    return max(2, min(8, DISTINCT_BYTES // (product.inputs * product.outputs * DTYPE.itemsize)))


def num_calls(product: Product) -> int:
    """Calls of one program, no two of the same layer and the same rows."""
    return max(2, min(40, PROGRAM_BYTES // (product.inputs * product.outputs * DTYPE.itemsize)))


def stacked_shape(product: Product) -> tuple[int, ...]:
    inner = (product.outputs, product.inputs) if product.transposed else (product.inputs, product.outputs)
    return (num_layers(product), *inner)


def abstract_arguments(row: Row) -> tuple[Any, Any]:
    sharding = NamedSharding(mesh(), PartitionSpec())
    x = jax.ShapeDtypeStruct((row.num_rows, row.product.inputs), DTYPE, sharding=sharding)
    stacked = jax.ShapeDtypeStruct(stacked_shape(row.product), DTYPE, sharding=sharding)
    return stacked, [x] * NUM_INPUTS


def draw_weights(product: Product) -> jax.Array:
    """Random matrices of the size that keeps the products' variance at 1."""
    draw = jax.jit(lambda key: jax.random.normal(key, stacked_shape(product), DTYPE) * product.inputs**-0.5)
    return jax.device_put(draw(jax.random.key(product.outputs)), NamedSharding(mesh(), PartitionSpec()))


@functools.cache
def draw_inputs(product: Product, num_rows: int) -> list[jax.Array]:
    shape = (NUM_INPUTS, num_rows, product.inputs)
    drawn = jax.jit(lambda key: list(jax.random.normal(key, shape, DTYPE)))(jax.random.key(num_rows))
    return jax.device_put(drawn, NamedSharding(mesh(), PartitionSpec()))


def time_program(program: Compiled, arguments: tuple[Any, ...], rounds: int) -> tuple[float, np.ndarray]:
    """Gives the seconds of a program, the median over rounds of several in a row, and its last outcome."""
    outcome = jax.block_until_ready(program(*arguments))
    queued, times = 2, []
    for n in range(rounds + 1):
        begin = time.perf_counter()
        for _ in range(queued):
            outcome = program(*arguments)
        jax.block_until_ready(outcome)
        took = (time.perf_counter() - begin) / queued
        if n == 0:
            queued = max(2, min(20, int(4e-3 / took)))
        else:
            times.append(took)
    return statistics.median(times), np.asarray(outcome[-1], np.float32)


def compare(found: np.ndarray, expected: np.ndarray) -> float:
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def summarize(measured: list[Row], products: list[Product], numbers: list[int]) -> list[dict[str, Any]]:
    """The table's entries: the fastest right kernel of each product and number of rows, XLA unless one wins clearly."""
    entries = []
    print("\nproduct, rows: XLA, best")
    for product in products:
        chosen = []
        for n in sorted(numbers):
            own = [row for row in measured if row.product == product and row.num_rows == n and row.micros is not None]
            xla = next((row for row in own if row.choice == XLA), None)
            if xla is None or xla.micros is None:
                continue
            right = [row for row in own if row.error is not None and row.error < MAX_ERROR]
            best = min(right, key=lambda row: row.micros or 0.0, default=xla)
            if best.micros is None or best.micros > GAIN * xla.micros:
                best = xla
            times = {"micros": round(best.micros or 0.0, 1), "xla_micros": round(xla.micros, 1)}
            chosen.append({"up_to": n, **best.describe(), **times})
            print(f"{name(product)}, {n}: {xla.micros:.1f} us, {best.micros:.1f} us {show(best.choice)}", flush=True)
        if chosen:
            entries.append({**product._asdict(), "rows": chosen})
    return entries


def write_table(path: Path, about: dict[str, str], entries: list[dict[str, Any]]) -> None:
    """Writes a table; products and numbers of rows that were not measured this time stay as they are."""
    known = json.loads(path.read_text())["products"] if path.exists() else []
    merged: dict[Product, dict[int, dict[str, Any]]] = {}
    for entry in [*known, *entries]:
        rows = merged.setdefault(Product(*(entry[field] for field in Product._fields)), {})
        rows |= {row["up_to"]: row for row in entry["rows"]}
    content = about | {
        "products": [
            {**product._asdict(), "rows": [rows[up_to] for up_to in sorted(rows)]} for product, rows in merged.items()
        ]
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}")


def name(product: Product) -> str:
    return f"{product.inputs} x {product.outputs}{' transposed' if product.transposed else ''}"


def show(choice: Choice) -> str:
    config = choice.config
    constants = [] if config is None else [f"{f.name} {getattr(config, f.name)}" for f in dataclasses.fields(config)]
    return ", ".join([choice.kernel, *constants])


def line(row: Row) -> str:
    time = f"{row.micros:8.1f} us" if row.micros is not None else "        --"
    error = "" if row.error is None else f"{row.error:.1e}"
    return f"| {name(row.product):24} | {row.num_rows:4} | {time} | {error:7} | {show(row.choice)} | {row.note}"


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


def commit() -> str:
    """The short hash of the checkout, with a mark if it has changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
