"""What a device can do at best: bytes a second of a copy, FLOPs a second of a matrix product. Knows no model."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_COPIED = 1 << 29  # float32 numbers, 2 GiB
_SIZE = 8192  # of the matrices
_CPU_SHRINK = 8  # a CPU has less memory, and far less time


class Ceilings(NamedTuple):
    """Bytes a second, read and written, and FLOPs a second."""

    copy: float
    matmul: float

    def __str__(self) -> str:
        return f"copy {self.copy / 1e9:,.0f} GB/s, matmul {self.matmul / 1e12:,.1f} TFLOP/s"


def measure_ceilings(shrink: int = 1, dtype: str = "bfloat16") -> Ceilings:
    """Copies 2 GiB and multiplies 8192 x 8192 matrices of random numbers; `shrink` divides the sizes."""
    x = jax.random.normal(jax.random.key(0), (_COPIED // shrink**2,), jnp.float32)
    copy = 2 * x.nbytes / _seconds(lambda x: x * 1.0001, x)
    del x
    size = _SIZE // shrink
    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.dtype(dtype)) for n in (1, 2))
    return Ceilings(copy, 2 * size**3 / _seconds(jnp.matmul, a, b))


def ceilings_of_device(dtype: str) -> Ceilings:
    """Measures the default device, for products of a type; "auto" is the one that engines choose there."""
    is_cpu = jax.devices()[0].platform == "cpu"
    if dtype == "auto":
        dtype = "float32" if is_cpu else "bfloat16"
    return measure_ceilings(_CPU_SHRINK if is_cpu else 1, dtype)


def _seconds(function: Callable, *arrays: jax.Array) -> float:
    """The median time of a call, several in a row at a time."""
    # As engines do: where XLA_FLAGS keep XLA from trying its own products, the one it takes reaches 11 TFLOP/s of 733.
    options = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None
    compiled = jax.jit(function).lower(*arrays).compile(options)
    times = []
    for n in range(9):
        begin = time.perf_counter()
        jax.block_until_ready([compiled(*arrays) for _ in range(4)])
        if n >= 2:
            times.append((time.perf_counter() - begin) / 4)
    return statistics.median(times)
