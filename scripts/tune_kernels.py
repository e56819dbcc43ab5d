"""Measures which kernel multiplies each matrix of a model fastest on this GPU, and writes the table that engines read.

python scripts/tune_kernels.py --models llama-3.1-8b,qwen3-0.6b --seconds 100 --rows 8,32,64,128,256

Every product of a layer and the head's, at each number of rows: XLA's GEMM (cuBLASLt, as it is tuned and as it comes)
against our Triton and Mosaic kernels and jax's Mosaic kernel with several sets of constants. A program multiplies one
product after the other, each read by a small kernel, with the matrices of as many layers as exceed the L2 cache, and
is captured as a whole (a CUDA graph), as a step is. Processes of their own compile our kernels, while XLA tunes its
products on a GPU that does nothing else; the likely ones come before the others, as far as the time goes. Then one
process after the other times its programs, and their results are compared with XLA's. A table that exists is
completed: what is measured again is replaced.
"""

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from jaxllm.kernels.matmul.choice import (
    TABLES,
    XLA,
    Choice,
    Config,
    FewRowsConfig,
    MosaicConfig,
    Product,
    Stack,
    TurnedConfig,
    table_path,
)
from jaxllm.kernels.matmul.tuned import multiply
from jaxllm.models.config import ModelConfig
from jaxllm.models.registry import find_family

SHAPES = Path(__file__).parents[1] / "jaxllm" / "models" / "shapes"
DTYPE = jnp.dtype(jnp.bfloat16)
DISTINCT_BYTES = 256 << 20  # of matrices that a program reads in turn: many times the L2 cache
PROGRAM_BYTES = 1000 << 20  # and in all: about as long as a call of a program takes on the host, several times
NUM_INPUTS = 3  # each costs time on the host
DRAWN = (1 << 24) + 43  # random numbers that fill the matrices, over and over
PATIENCE = 10  # seconds for one row; a process that takes longer has hung
GAIN = 0.97  # another kernel must take less than that share of XLA's time
MARGIN = 2.0  # and as many microseconds less: XLA adds the residual itself, which is a kernel of its own otherwise
MAX_ERROR = 1e-2  # relative to XLA's result
COMPARED = 37  # every so manieth output is compared; a kernel's tiles are wider
ROOM = 206 << 10  # of shared memory for the stages of a block
MOST_READ = 65536  # outputs up to which a small kernel reads the product
NAMES: dict[type, str] = {FewRowsConfig: "triton", MosaicConfig: "mosaic", TurnedConfig: "turned"}
# Products as a step has them: cuBLASLt instead of XLA's Triton GEMMs.
OPTIONS: dict[str, bool | int] = {"xla_gpu_enable_triton_gemm": False}
UNTUNED: dict[str, bool | int] = {"xla_gpu_autotune_level": 0}


@dataclass(slots=True)
class Row:
    """One kernel with its constants for one product and number of rows."""

    product: Product
    num_rows: int
    choice: Choice
    micros: float | None = None
    error: float | None = None
    note: str = ""
    is_tuned: bool = True  # XLA's, by trying

    def describe(self) -> dict[str, Any]:
        config = {} if self.choice.config is None else {"config": dataclasses.asdict(self.choice.config)}
        return {"kernel": self.choice.kernel, **config}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do: bytes a second of a copy, and operations a second of a large product."""

    copy: float
    matmul: float

    def floor(self, product: Product, num_rows: int) -> float:
        """Microseconds that a product takes at least."""
        I, O, T = product.inputs, product.outputs, num_rows
        num_bytes = (I * O + T * I + T * O) * DTYPE.itemsize
        return max(num_bytes / self.copy, 2 * T * I * O / self.matmul) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="llama-3.1-8b", help="shapes of jaxllm/models/shapes, or config.json files")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--rows", default="256,128,64,512,16,8,32,384", help="numbers of rows to measure, in this order"
    )
    parser.add_argument("--seconds", type=float, default=300, help="no new program is compiled after 60%% of it")
    parser.add_argument("--processes", type=int, default=max(1, min(10, (os.cpu_count() or 2) - 4)))
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the tables")
    parser.add_argument("--json", type=Path, help="write every row there too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shrink", type=int, default=1, help="divides every size, to try the script itself")
    args = parser.parse_args()
    begin = time.time()
    deadlines = (begin + args.seconds * 0.6, begin + args.seconds)
    shapes = [read_shapes(model) for model in args.models.split(",")]
    products = list(
        dict.fromkeys(p for cfg in shapes for p in list_products(cfg, args.tensor_parallel_size, args.shrink))
    )
    numbers = [int(number) for number in args.rows.split(",")]
    groups = [list(candidates(product, n)) for n in numbers for product in products]
    rows = in_order_of_promise(groups)
    measured, ceilings = measure(rows, deadlines, args.processes, args.rounds)
    device = jax.devices()[0].device_kind
    print(f"command: {' '.join(sys.argv)}\ncommit:  {commit()}\ndevice:  {device}")
    print(f"copy {ceilings.copy / 1e12:.2f} TB/s, matmul {ceilings.matmul / 1e12:.0f} TFLOP/s")
    print(f"{len(measured)} of {len(rows)} programs in {time.time() - begin:.0f} s")
    entries = summarize(measured, products, numbers, ceilings)
    about = {"device": device, "command": " ".join(sys.argv), "commit": commit(), "jax": jax.__version__}
    write_table(table_path(device, args.tables), about, entries)
    if args.json:
        args.json.write_text(json.dumps(about | {"rows": [dataclasses.asdict(row) for row in measured]}))


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
    yield Row(product, num_rows, XLA)
    configs = [*turned_configs(product, num_rows)]
    if num_rows <= 64:
        configs = interleaved(configs, list(few_rows_configs(product, num_rows)))
    if num_rows >= 128:
        configs = interleaved(configs, list(mosaic_configs(product, num_rows)))
    for config in dict.fromkeys(configs):
        if config.takes(product, num_rows):
            yield Row(product, num_rows, Choice(NAMES[type(config)], config))
    yield Row(product, num_rows, XLA, is_tuned=False)


def interleaved(many: list[Config], few: list[Config]) -> list[Config]:
    """Two of the first, one of the second, and so on."""
    mixed: list[Config] = []
    for i in range(max(-(-len(many) // 2), len(few))):
        mixed += many[2 * i : 2 * i + 2] + few[i : i + 1]
    return mixed


def turned_configs(product: Product, num_rows: int) -> Iterator[Config]:
    """Tiles with parts that keep most of 132 multiprocessors busy, alone and in clusters."""
    # outputs of a warpgroup, most rows, inputs of a turn, clusters
    if num_rows <= 32:
        tiles = [(64, 32, 128, (1,)), (128, 32, 64, (1,)), (64, 32, 64, (1,))]
    elif num_rows <= 64:
        tiles = [(64, 64, 128, (1, 2)), (128, 64, 64, (1, 2)), (64, 64, 64, (1,))]
    elif num_rows <= 128:
        tiles = [(128, 128, 64, (2, 4, 1)), (64, 128, 64, (2, 4)), (64, 128, 128, (2,))]
    elif num_rows == 384:
        tiles = [(64, 192, 64, (2, 4)), (128, 192, 64, (2,)), (128, 128, 64, (2,))]
    else:
        tiles = [(64, 256, 64, (2, 4, 1)), (128, 128, 64, (2, 4)), (128, 192, 64, (2,)), (64, 128, 64, (4,))]
    for tile_out, most, tile_in, clusters in tiles:
        tile_rows = min(most, -(-num_rows // 8) * 8)
        stages = min(10, ROOM // ((2 * tile_out + tile_rows) * tile_in * DTYPE.itemsize))
        blocks = -(-product.outputs // (2 * tile_out)) * -(-num_rows // tile_rows)
        for cluster in clusters:
            for split in splits(product, blocks, tile_in, num_rows):
                yield TurnedConfig(tile_out, tile_rows, tile_in, stages, split, cluster)


def splits(product: Product, blocks: int, tile_in: int, num_rows: int) -> list[int]:
    """The numbers of parts, two at most, with which so many blocks fill the multiprocessors best."""
    turns = product.inputs // tile_in
    fitting = [n for n in (1, 2, 3, 4, 6, 8) if turns % n == 0 and turns // n >= 4 and (n == 1 or blocks * n <= 264)]
    if num_rows > 128:
        fitting = [n for n in fitting if n <= 4]

    def waste(n: int) -> float:
        waves = blocks * n / 132
        return -(-waves // 1) / waves + 0.04 * n

    return sorted(fitting, key=waste)[:2] if blocks < 264 else [1]


def few_rows_configs(product: Product, num_rows: int) -> Iterator[Config]:
    """Tiles, each with parts for about two programs on each of 132 multiprocessors."""
    # tile_in, tile_out, warps, stages, on tensor cores
    if num_rows > 16:
        tiles = [(64, 128, 8, 4, True), (64, 64, 4, 5, True)]
    else:
        tiles = [(128, 64, 4, 5, True), (64, 128, 4, 5, True), (128, 128, 8, 4, True)]
    if num_rows == 1:
        alone = [(512, 8), (256, 16), (1024, 8)] if product.transposed else [(64, 128), (32, 256), (32, 128)]
        tiles[1:1] = [(*tile, 4, 1, False) for tile in alone]
    for tile in tiles:
        tile_in, tile_out, *_ = tile
        split = 1
        while product.outputs // tile_out * split * 2 <= 264 * 1.4 and product.inputs // split >= 4 * tile_in:
            split *= 2
        yield FewRowsConfig(tile_in, tile_out, split, *tile[2:])


def mosaic_configs(product: Product, num_rows: int) -> Iterator[Config]:
    """Tiles of a warpgroup; small ones, where large ones would leave multiprocessors idle."""
    tiles = [(128, 128, True), (64, 128, True)]
    if num_rows <= 128:
        tiles = [(64, 128, True), (64, 64, False)]
    elif product.outputs > 16384:
        tiles = [(128, 128, False), (64, 256, False)]
    for tile_rows, tile_out, side_by_side in tiles:
        yield MosaicConfig(tile_rows, tile_out, 64, 4, side_by_side)


def in_order_of_promise(groups: list[list[Row]]) -> list[Row]:
    """XLA's of every group, then the first of every group that is another kernel's, then the second, and so on."""
    longest = max(map(len, groups))
    return [group[place] for place in range(longest) for group in groups if place < len(group)]


def measure(
    rows: list[Row], deadlines: tuple[float, float], num_processes: int, rounds: int
) -> tuple[list[Row], Ceilings]:
    """Gives the rows that were compiled in time and ran, with their times, and what the device can do."""
    context = multiprocessing.get_context("spawn")
    products = list(dict.fromkeys(row.product for row in rows))
    workers = []
    for n in range(num_processes):
        others = [row for row in rows if row.choice != XLA and row.product in products[n::num_processes]]
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, others, deadlines, rounds), daemon=True)
        process.start()
        there.close()  # so that the end of the process is seen
        workers.append((process, here))
    with ThreadPoolExecutor(2) as pool:  # XLA tunes one product at a time
        own = [[row for row in rows if row.choice == XLA and row.is_tuned == is_tuned] for is_tuned in (True, False)]
        compiled = pool.map(lambda part: [(row, compile_row(row, deadlines[0])) for row in part], own)
        programs = [pair for part in compiled for pair in part]
    ready = [receive(connection, deadlines[0] + 2 * PATIENCE) for _, connection in workers]
    ceilings = measure_ceilings()
    expected: dict[tuple[Product, int], np.ndarray] = {}
    measured = list(time_programs(programs, expected, deadlines[1], rounds))
    for (process, connection), num_programs in zip(workers, ready, strict=True):
        try:
            connection.send(expected)
            while num_programs is not None and (row := receive(connection, time.time() + PATIENCE)) is not None:
                measured.append(row)
        except OSError as error:  # one that died; the others go on
            print(first_line(error))
        process.kill()  # one that hangs, too
    return measured, ceilings


def receive(connection: Connection, last: float) -> Any:
    """What a worker sends in time; None where it does not."""
    try:
        return connection.recv() if connection.poll(max(0.0, last - time.time())) else None
    except EOFError:
        return None


def work(connection: Connection, rows: list[Row], deadlines: tuple[float, float], rounds: int) -> None:
    """Compiles rows, waits for its turn on the GPU, and times them."""
    programs = [(row, compile_row(row, deadlines[0])) for row in rows]
    connection.send(sum(program is not None for _, program in programs))
    for row in time_programs(programs, connection.recv(), deadlines[1], rounds):
        connection.send(row)
    connection.send(None)


def time_programs(
    programs: list[tuple[Row, Compiled | None]],
    expected: dict[tuple[Product, int], np.ndarray],
    last: float,
    rounds: int,
) -> Iterator[Row]:
    """Gives the rows that have a time or a note; what XLA's products are is added to what is expected."""
    for row, program in sorted(programs, key=lambda pair: pair[0].product):
        if program is not None and time.time() < last:
            try:
                arguments = (draw_weights(row.product), draw_inputs(row.product, row.num_rows))
                seconds, outcome = time_program(program, arguments, rounds)
                row.micros = seconds / num_calls(row.product) * 1e6
                key = (row.product, row.num_rows)
                row.error = compare(outcome, expected.setdefault(key, outcome) if row.choice == XLA else expected[key])
            except Exception as error:  # whatever one set of constants does, the others go on
                row.note = first_line(error)
        if row.micros is not None or row.note:
            yield row


def compile_row(row: Row, last: float) -> Compiled | None:
    """Compiles a row's program; None where it does not compile, with a note, or when it is too late to begin."""
    if time.time() > last:
        return None
    options = OPTIONS | ({} if row.is_tuned else UNTUNED) if jax.default_backend() == "gpu" else None
    try:
        return jax.jit(program_of(row)).lower(*abstract_arguments(row)).compile(options)
    except Exception as error:  # the same
        row.note = first_line(error)
        return None


def program_of(row: Row) -> Callable:
    """Multiplies with one layer after the other; what comes of it is read by something cheap."""

    @jax.jit  # traced once, however often it is called
    def one(stacked: jax.Array, layer: jax.Array, weight: jax.Array, x: jax.Array) -> jax.Array:
        return multiply(row.choice, x, weight, transposed=row.product.transposed, stack=Stack(stacked, layer))

    def run(stacked: jax.Array, inputs: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        outcomes: list[jax.Array] = []
        for n in range(num_calls(row.product)):
            layer = n % len(stacked)
            x = inputs[n % len(inputs)]
            if outcomes:  # as in a step, rows come of the product before; otherwise two could run at once
                outcomes[-1] = jax.lax.optimization_barrier(outcomes[-1])  # XLA would sum up several at a time
                x = x + outcomes[-1][:, :1] * 0
            product = one(stacked, jnp.int32(layer), stacked[layer], x)
            if row.product.outputs > MOST_READ:
                outcomes.append(product)
            else:
                outcomes = [sum(outcomes, jax.nn.silu(product))]
        return outcomes, outcomes[-1][:, ::COMPARED]

    # A mesh, since Mosaic asks it for the number of multiprocessors.
    whole = PartitionSpec()
    return jax.shard_map(run, mesh=mesh(), in_specs=whole, out_specs=whole, check_vma=False)


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), ("device",))


def num_layers(product: Product) -> int:
    return max(2, min(64, DISTINCT_BYTES // (product.inputs * product.outputs * DTYPE.itemsize)))


def num_calls(product: Product) -> int:
    """Calls of one program, none of which follows one of the same layer."""
    return max(2, min(24, PROGRAM_BYTES // (product.inputs * product.outputs * DTYPE.itemsize)))


def stacked_shape(product: Product) -> tuple[int, ...]:
    inner = (product.outputs, product.inputs) if product.transposed else (product.inputs, product.outputs)
    return (num_layers(product), *inner)


def abstract_arguments(row: Row) -> tuple[Any, Any]:
    sharding = NamedSharding(mesh(), PartitionSpec())
    x = jax.ShapeDtypeStruct((row.num_rows, row.product.inputs), DTYPE, sharding=sharding)
    stacked = jax.ShapeDtypeStruct(stacked_shape(row.product), DTYPE, sharding=sharding)
    return stacked, [x] * NUM_INPUTS


@functools.lru_cache(1)
def draw_weights(product: Product) -> jax.Array:
    """Random matrices of the size that keeps the products' variance at 1."""
    drawn = jax.device_put(draw() * np.float32(product.inputs**-0.5)).astype(DTYPE)
    return jax.device_put(jnp.resize(drawn, stacked_shape(product)), NamedSharding(mesh(), PartitionSpec()))


@functools.lru_cache(2)
def draw_inputs(product: Product, num_rows: int) -> list[jax.Array]:
    size = num_rows * product.inputs
    drawn = [draw()[n * 1009 : n * 1009 + size].reshape(num_rows, -1).astype(DTYPE) for n in range(NUM_INPUTS)]
    return jax.device_put(drawn, NamedSharding(mesh(), PartitionSpec()))


@functools.cache
def draw() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(DRAWN, np.float32)


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
            queued = max(2, min(20, int(2e-3 / took)))
        else:
            times.append(took)
    return statistics.median(times), np.asarray(outcome[1], np.float32)


def measure_ceilings() -> Ceilings:
    """A copy of a gigabyte, which reads and writes it, and a product of large matrices."""
    size, num_bytes = (64, 1 << 16) if jax.default_backend() != "gpu" else (8192, 1 << 30)
    ones = jnp.resize(jax.device_put(draw()[:1000003]).astype(DTYPE), (num_bytes // DTYPE.itemsize,))
    square = jnp.resize(jax.device_put(draw()[:1000003]).astype(DTYPE), (size, size))
    copy = best_seconds(jax.jit(lambda x: -x), ones)
    matmul = best_seconds(jax.jit(lambda x: x @ x), square)
    return Ceilings(2 * num_bytes / copy, 2 * size**3 / matmul)


def best_seconds(run: Callable, argument: jax.Array) -> float:
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        outcome = None
        for _ in range(10):
            outcome = run(argument)
        jax.block_until_ready(outcome)
        times.append((time.perf_counter() - begin) / 10)
    return min(times)


def compare(found: np.ndarray, expected: np.ndarray) -> float:
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def summarize(
    measured: list[Row], products: list[Product], numbers: list[int], ceilings: Ceilings
) -> list[dict[str, Any]]:
    """The table's entries: the fastest right kernel of each product and number of rows, XLA unless one wins clearly."""
    entries = []
    print("\nproduct | rows | best | us | XLA us, untuned | floor us")
    for product in products:
        chosen = []
        for n in sorted(numbers):
            own = [row for row in measured if row.product == product and row.num_rows == n and row.micros is not None]
            xla = next((row for row in own if row.choice == XLA and row.is_tuned), None)
            if xla is None or xla.micros is None:
                continue
            untuned = next((row.micros for row in own if row.choice == XLA and not row.is_tuned), None)
            right = [row for row in own if row.error is not None and row.error < MAX_ERROR and row.is_tuned]
            best = min(right, key=lambda row: row.micros or 0.0, default=xla)
            quickest = best
            if best.micros is None or best.micros > min(GAIN * xla.micros, xla.micros - MARGIN):
                best = xla
            times = {"micros": round(best.micros or 0.0, 1), "xla_micros": round(xla.micros, 1)}
            chosen.append({"up_to": n, **best.describe(), **times})
            floor = ceilings.floor(product, n)
            cells = [name(product), str(n), show(quickest.choice), f"{quickest.micros:.1f}"]
            cells += [f"{xla.micros:.1f} {untuned or 0.0:.1f}", f"{floor:.1f}"]
            print(" | ".join(cells), flush=True)
        if chosen:
            entries.append({**product._asdict(), "rows": chosen})
    wrong = [row for row in measured if row.note or (row.error is not None and not row.error < MAX_ERROR)]
    for row in wrong[:12]:
        print(f"{name(row.product)}, {row.num_rows}, {show(row.choice)}: error {row.error} {row.note[:100]}")
    if wrong:
        print(f"{len(wrong)} failed or were wrong")
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
    return f"{product.inputs}x{product.outputs}{'T' if product.transposed else ''}"


def show(choice: Choice) -> str:
    if choice.config is None:
        return choice.kernel
    return " ".join([choice.kernel, *(str(int(value)) for value in dataclasses.astuple(choice.config))])


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"


def commit() -> str:
    """The short hash of the checkout, with a mark if it has changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
