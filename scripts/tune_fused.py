"""Measures with which constants fused products of few rows are fastest on this GPU, and writes the table engines read.

python scripts/tune_fused.py --models llama-3.1-8b,qwen3-0.6b --seconds 50

The four products of a layer with the norm before and what follows: XLA, one operation after the other, against the
Triton kernel with several sets of constants. A program is a chain of one of them, each adding to the last one's result,
with the matrices of as many layers as exceed the L2 cache, captured as a whole (a CUDA graph) as a step is; a time is
the program's divided by its length, so the gaps between kernels are in it. Several processes compile; one at a time is
on the GPU. A table that exists is completed: what is measured again is replaced.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the GPU

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.kernels.fused_linear import choice
from jaxllm.kernels.fused_linear.choice import Fused, FusedConfig
from jaxllm.kernels.fused_linear.reference import gated
from jaxllm.kernels.matmul.choice import Stack, table_path
from jaxllm.kernels.matmul.tuned import matmul
from jaxllm.kernels.rms_norm.reference import rms_norm
from jaxllm.models.registry import find_family

SHAPES = Path(__file__).parents[1] / "jaxllm" / "models" / "shapes"
DTYPE = jnp.dtype(jnp.bfloat16)
EPS = 1e-5
DISTINCT_BYTES = 200 << 20  # of matrices that a program reads in turn: several times the L2 cache
PROGRAM_BYTES = 1400 << 20  # and in all, for a program that takes longer on the GPU than its launch on the host
MOST_KERNELS = 84
ROOM = 224 << 10  # of shared memory for the stages of a program
GAIN = 0.97  # the kernel must take less than that share of XLA's time
ADDED = ("linear_add", "linear_all_reduce")  # to a residual, without a norm
EXCHANGE = 4.0  # microseconds: what a sum over the ranks takes longer in a kernel of its own than behind a product
MAX_ERROR = 2e-2  # relative to XLA's result, both rounded
# A step's own: products are not XLA's Triton GEMMs. Nothing is tuned by trying: other processes are being timed.
OPTIONS: dict[str, bool | int] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}

# (inputs, outputs, warps, stages), the likely ones first.
ONE_ROW = [
    (256, 32, 8, 3),
    (256, 16, 8, 3),
    (512, 16, 8, 1),
    (256, 32, 8, 1),
    (128, 32, 4, 4),
    (128, 64, 8, 3),
    (512, 32, 8, 1),
    (256, 64, 8, 1),
    (256, 16, 4, 4),
    (512, 8, 8, 1),
    (128, 64, 4, 4),
    (1024, 16, 8, 1),
    (256, 64, 16, 1),
    (512, 64, 16, 1),
    (512, 32, 16, 1),
    (256, 32, 16, 1),
]
TENSOR_CORES = [
    (128, 32, 4, 5),
    (128, 16, 4, 6),
    (128, 64, 4, 4),
    (256, 16, 4, 4),
    (256, 32, 4, 3),
    (64, 32, 4, 6),
    (64, 64, 4, 5),
    (128, 32, 8, 5),
    (128, 32, 2, 5),
    (256, 32, 8, 4),
    (256, 16, 2, 4),
    (128, 64, 8, 4),
]


class Case(NamedTuple):
    fused: Fused
    num_rows: int

    @property
    def num_bytes(self) -> int:
        return self.fused.inputs * self.fused.outputs * DTYPE.itemsize

    @property
    def num_results(self) -> int:
        return self.fused.outputs // (2 if self.fused.operation == "norm_gated_linear" else 1)


@dataclasses.dataclass(slots=True)
class Row:
    """One set of constants in one case; XLA has none."""

    case: Case
    config: FusedConfig | None
    micros: float | None = None
    error: float | None = None
    note: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="qwen3-0.6b,llama-3.1-8b", help="shapes of jaxllm/models/shapes, or files")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--rows", default="1,16", help="numbers of rows to measure, each for all below it")
    parser.add_argument("--seconds", type=float, default=50, help="no new program is compiled after that")
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--tables", type=Path, default=choice.TABLES, help="folder of the tables")
    parser.add_argument("--json", type=Path, help="write every row there too")
    args = parser.parse_args()
    begin = time.time()
    layers = {model: list_layer(model, args.tensor_parallel_size) for model in args.models.split(",")}
    products = dict.fromkeys(fused for layer in layers.values() for fused in layer)
    numbers = sorted(int(number) for number in args.rows.split(","))
    cases = [Case(fused, n) for n in numbers for fused in products]
    rows, device = measure(cases, args.processes, begin + args.seconds)
    print(f"command: {' '.join(sys.argv)}\ncommit:  {commit()}\ndevice:  {device}")
    print(f"{len([row for row in rows if row.micros])} programs in {time.time() - begin:.0f} s")
    entries = summarize(rows, list(products), numbers, layers)
    about = {"device": device, "command": " ".join(sys.argv), "commit": commit(), "jax": jax.__version__}
    write_table(table_path(device, args.tables), about, entries)
    if args.json:
        args.json.write_text(json.dumps(about | {"rows": [dataclasses.asdict(row) for row in rows]}))


def list_layer(model: str, num_ranks: int) -> list[Fused]:
    """The products of one layer of a model on each of so many tensor ranks, in their order."""
    path = SHAPES / f"{model}.json"
    hf_config = json.loads((path if path.exists() else Path(model)).read_text())
    cfg = find_family(hf_config)[1].configure(hf_config)
    D, F, queries = cfg.d_model, cfg.d_ff // num_ranks, cfg.num_q_heads * cfg.head_dim // num_ranks
    add = "linear_add" if num_ranks == 1 else "linear_all_reduce"
    return [
        Fused("norm_linear", D, queries + 2 * cfg.num_kv_heads * cfg.head_dim // num_ranks, DTYPE.name),
        Fused(add, queries, D, DTYPE.name),
        Fused("norm_gated_linear", D, 2 * F, DTYPE.name),
        Fused(add, F, D, DTYPE.name),
    ]


def candidates(case: Case) -> Iterator[FusedConfig]:
    """Constants that fit into a multiprocessor, of which there are enough programs but not too many."""
    sizes = [(size, False) for size in ONE_ROW] if case.num_rows == 1 else []
    sizes += [(size, True) for size in TENSOR_CORES[: 2 if sizes else None]]
    num_matrices = 2 if case.fused.operation == "norm_gated_linear" else 1
    for (tile_in, tile_out, warps, stages), on_tensor_cores in sizes:
        num_programs = -(-case.num_results // tile_out)
        in_flight = stages * tile_in * (tile_out * num_matrices + (16 if on_tensor_cores else 0)) * DTYPE.itemsize
        if 30 <= num_programs <= 1300 and tile_in <= case.fused.inputs and in_flight <= ROOM:
            yield FusedConfig(tile_in, tile_out, warps, stages, on_tensor_cores)


def measure(cases: list[Case], num_processes: int, deadline: float) -> tuple[list[Row], str]:
    """Deals the cases to processes, and gives all rows, and the name of the device."""
    context = multiprocessing.get_context("spawn")
    gpu, queue = context.Lock(), context.Queue()
    shares = [share for n in range(num_processes) if (share := cases[n::num_processes])]
    workers = [context.Process(target=work, args=(share, deadline, gpu, queue), daemon=True) for share in shares]
    for worker in workers:
        worker.start()
    rows: list[Row] = []
    device = ""
    waiting = len(workers)
    while waiting and time.time() < deadline + 30:
        try:
            found = queue.get(timeout=1)
        except Empty:
            continue
        if isinstance(found, str):
            device, waiting = found, waiting - 1
        else:
            rows.append(found)
    for worker in workers:
        worker.terminate()
    return rows, device


def work(cases: list[Case], deadline: float, gpu, queue) -> None:
    """Compiles and times one case's constants after the other's; the lock is held while the GPU is timed."""
    for case in cases:
        expected = None
        inputs = None
        for config in [None, *candidates(case)]:
            if time.time() > deadline:
                break
            row = Row(case, config)
            try:
                inputs = draw(case) if inputs is None else inputs
                run = compile_chain(case, config, inputs)
                with gpu:
                    row.micros, out = time_chain(case, run, inputs)
                expected = out if expected is None else expected
                row.error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
            except Exception as error:  # whatever one set of constants does, the others go on
                row.note = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"
            queue.put(row)
        del inputs
    queue.put(jax.devices()[0].device_kind)


def num_layers(case: Case) -> int:
    return max(2, -(-DISTINCT_BYTES // case.num_bytes))


def length(case: Case) -> int:
    return min(MOST_KERNELS, max(num_layers(case), -(-PROGRAM_BYTES // case.num_bytes)))


def draw(case: Case) -> tuple[jax.Array, ...]:
    """Rows, scales, matrices and the first result, random, the sums of about the size of what they are added to."""
    I, O, L = case.fused.inputs, case.fused.outputs, num_layers(case)
    keys = jax.random.split(jax.random.key(case.num_rows), 4)
    normal = jax.jit(lambda key, shape: jax.random.normal(key, shape, DTYPE), static_argnums=1)
    x, scales = normal(keys[0], (case.num_rows, I)), 1 + normal(keys[1], (L, I)) / 4
    weights = jax.jit(lambda key: jax.random.normal(key, (L, I, O), DTYPE) * DTYPE.type(I**-0.5))(keys[2])
    return x, scales, weights, normal(keys[3], (case.num_rows, case.num_results))


def compile_chain(case: Case, config: FusedConfig | None, inputs: tuple[jax.Array, ...]) -> Callable:
    operation = case.fused.operation

    def plain(x, scale, stack, out):  # of a sum over ranks one rank's product, with what it is added to
        normed = x if operation in ADDED else rms_norm(x, scale, eps=EPS)
        product = matmul(normed, stack.matrices[stack.layer], stack=stack)
        return out + (gated(product, "silu") if operation == "norm_gated_linear" else product)

    def chain(x, scales, weights, out):
        for n in range(length(case)):
            layer = n % num_layers(case)
            if config is None:
                # As in a step, a product waits for the one before: XLA would make one of all that share their rows.
                x, out = jax.lax.optimization_barrier((x, out))
                out = plain(x, scales[layer], Stack(weights, layer), out)
                continue
            from jaxllm.kernels.fused_linear.triton import multiply

            activation = "silu" if operation == "norm_gated_linear" else None
            scaled = None if operation in ADDED else scales
            out = multiply(config, x, Stack(weights, layer), scaled, out, eps=EPS, activation=activation)
        return out

    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in inputs]
    return jax.jit(chain, compiler_options=OPTIONS).lower(*shapes).compile()


def time_chain(case: Case, run: Callable, inputs: tuple[jax.Array, ...]) -> tuple[float, np.ndarray]:
    """The microseconds of one of the chain, the best of several rounds, and the chain's result."""
    best = float("inf")
    out = jax.block_until_ready(run(*inputs))
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(8):
            out = run(*inputs)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - begin) / 8)
    return best / length(case) * 1e6, np.asarray(out, np.float32)


def summarize(
    rows: list[Row], products: list[Fused], numbers: list[int], layers: dict[str, list[Fused]]
) -> list[dict[str, Any]]:
    """The table's entries: the fastest right constants of each product and number of rows, none unless they win."""
    entries, micros = [], {}
    print("\nproduct | rows | us | TB/s | XLA us | constants (inputs, outputs, warps, stages, tensor cores) | others")
    for fused in products:
        chosen = []
        for n in numbers:
            case = Case(fused, n)
            own = [row for row in rows if row.case == case and row.micros is not None]
            xla = next((row for row in own if row.config is None), None)
            right = [row for row in own if row.config and row.error is not None and row.error < MAX_ERROR]
            right.sort(key=lambda row: row.micros or 0.0)
            if xla is None or not right:
                continue
            best = right[0]
            assert best.micros is not None
            assert xla.micros is not None
            allowed = GAIN * xla.micros + (EXCHANGE if fused.operation == "linear_all_reduce" else 0.0)
            config = best.config if best.micros < allowed and fits(fused, best.config, n) else None
            times = {"micros": round(best.micros, 2), "xla_micros": round(xla.micros, 2)}
            chosen.append({"up_to": n, "config": config and dataclasses.asdict(config), **times})
            micros[case] = (min(best.micros, xla.micros), xla.micros)
            cells = [f"{fused.operation} {fused.inputs}x{fused.outputs}", str(n), f"{best.micros:.2f}"]
            cells += [f"{case.num_bytes / best.micros / 1e6:.2f}", f"{xla.micros:.2f}", show(best.config)]
            print(" | ".join([*cells, "; ".join(f"{show(r.config)} {r.micros:.2f}" for r in right[1:])]), flush=True)
        if chosen:
            entries.append({**fused._asdict(), "rows": chosen})
    for model, layer in layers.items():
        for n in numbers:
            times = [micros[Case(fused, n)] for fused in layer if Case(fused, n) in micros]
            if len(times) == len(layer):
                own, theirs = (sum(column) for column in zip(*times, strict=True))
                print(f"{model}, {n} rows: the products of a layer {own:.1f} us, XLA {theirs:.1f} us")
    for row in [row for row in rows if row.note or (row.error is not None and not row.error < MAX_ERROR)][:12]:
        print(f"{row.case.fused.operation}, {row.case.num_rows}, {show(row.config)}: error {row.error} {row.note}")
    return entries


def write_table(path: Path, about: dict[str, str], entries: list[dict[str, Any]]) -> None:
    """Writes a table; products and numbers of rows that were not measured this time stay as they are."""
    known = json.loads(path.read_text())["products"] if path.exists() else []
    merged: dict[Fused, dict[int, dict[str, Any]]] = {}
    for entry in [*known, *entries]:
        rows = merged.setdefault(Fused(*(entry[field] for field in Fused._fields)), {})
        rows |= {row["up_to"]: row for row in entry["rows"]}
    products = [{**fused._asdict(), "rows": [rows[n] for n in sorted(rows)]} for fused, rows in merged.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | {"products": products}, indent=1) + "\n")
    print(f"wrote {path}")


def fits(fused: Fused, config: FusedConfig | None, num_rows: int) -> bool:
    """Tells whether a sum over ranks has room for the results of a program."""
    return fused.operation != "linear_all_reduce" or config is None or choice.fits_a_chunk(config, num_rows)


def show(config: FusedConfig | None) -> str:
    return "XLA" if config is None else " ".join(str(int(value)) for value in dataclasses.astuple(config))


def commit() -> str:
    """The short hash of the checkout, with a mark if it has changes."""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
