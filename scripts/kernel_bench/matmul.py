"""Cases of matrix products, as a share of what copy bandwidth and matmul peak allow together."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm.bench.ceilings import Ceilings
from jaxllm.kernels.matmul import reference as xla_gemm
from jaxllm.kernels.matmul import tuned
from jaxllm.kernels.matmul.choice import Stack

from .shapes import DTYPE
from .timing import Runs


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
