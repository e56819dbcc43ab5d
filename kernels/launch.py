"""Runs a raw Triton kernel from traced JAX code: the one seam between our code, Triton's compiler and its interpreter.

Knows pointers, grids and compile-time constants. Refuses to know what a kernel computes. A kernel that Triton decorated
for its interpreter (TRITON_INTERPRET=1) runs on the CPU, through a callback; any other is compiled into the program.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_poison = False
_described_gpu: Any = None


def launch(
    kernel: Any,
    *operands: jax.Array | int,
    results: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    aliases: Mapping[int, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 1,
    max_registers: int | None = None,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Gives the results of `grid` programs of the kernel.

    The kernel's arguments are the operands (arrays as pointers, integers as they are), then those results that are no
    operand updated in place, in order. `aliases` names the latter: {operand: result}; the caller must not read such an
    operand again. The constants are the kernel's tl.constexpr arguments: each set of them is compiled. A thread
    gets `max_registers` at most.
    """
    aliases = dict(aliases or {})
    if _poison and len(aliases) < len(results):
        fresh = [i for i in range(len(results)) if i not in aliases.values()]
        aliases |= {len(operands) + n: i for n, i in enumerate(fresh)}
        operands = (*operands, *(_rubbish(results[i]) for i in fresh))
    if is_interpreted(kernel):
        scalars = {i: operand for i, operand in enumerate(operands) if isinstance(operand, int)}
        arrays = [operand for i, operand in enumerate(operands) if i not in scalars]
        run = functools.partial(_interpret, kernel, scalars, results, grid, aliases, constants)
        return tuple(jax.pure_callback(run, tuple(results), *arrays, vmap_method="sequential"))
    return _compile(kernel, operands, results, grid, aliases, num_warps, num_stages, constants, max_registers)


@contextlib.contextmanager
def poisoned_results() -> Iterator[None]:
    """Fills the results of kernels traced meanwhile with NaN beforehand, so that a test sees what was never written."""
    global _poison
    _poison = True
    try:
        yield
    finally:
        _poison = False


@contextlib.contextmanager
def compiling_for(gpu: Any) -> Iterator[None]:
    """Lets kernels traced meanwhile be made for a GPU that is not here but described (jax.experimental.topologies)."""
    global _described_gpu
    _described_gpu = gpu
    try:
        yield
    finally:
        _described_gpu = None


def capability() -> int:
    """The compute capability of the first GPU times ten; 90 (Hopper) where there is none."""
    try:
        major, _, minor = str(_first_gpu().compute_capability).partition(".")
    except (RuntimeError, AttributeError):
        return 90
    return int(major) * 10 + int(minor or 0)


def device_kind() -> str:
    """The kind of the GPU that is traced for, as jax names it ("NVIDIA H200"); "" where there is none."""
    traced_for = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if traced_for is not None:
        return traced_for.device_kind
    try:
        return _first_gpu().device_kind
    except RuntimeError:
        return ""


def num_multiprocessors() -> int:
    """Of the first GPU; 132 (an H100 or H200) where there is none."""
    try:
        return int(_first_gpu().core_count)
    except (RuntimeError, AttributeError):
        return 132


def _first_gpu() -> Any:
    return _described_gpu or jax.devices("gpu")[0]


def _compile(
    kernel, operands, results, grid, aliases, num_warps, num_stages, constants, max_registers=None
) -> tuple[jax.Array, ...]:
    """The launcher takes the first outputs for the kernel's own results: those in place come last."""
    triton_call = importlib.import_module("jaxllm.kernels.triton_call")  # Triton is of the extras for GPUs
    in_place = aliases.values()
    order = sorted(range(len(results)), key=lambda i: i in in_place)
    outputs = triton_call.call(
        kernel,
        operands,
        [results[i] for i in order],
        grid,
        {operand: order.index(result) for operand, result in aliases.items()},
        constants,
        capability=capability(),
        num_warps=num_warps,
        num_stages=num_stages,
        **_backend_options(),
        **({} if max_registers is None else {"maxnreg": max_registers}),
    )
    return tuple(outputs[order.index(i)] for i in range(len(results)))


def _backend_options() -> dict[str, Any]:
    # Newer Tritons do not fuse by themselves. They write PTX of the newest version that their own assembler knows, but
    # jaxlib takes the assembler of the machine's CUDA, which may be older: up to Hopper this version says all we need.
    return {"enable_fp_fusion": True} | ({"ptx_version": 87} if capability() < 100 else {})


def _rubbish(result: jax.ShapeDtypeStruct) -> jax.Array:
    value = jnp.nan if jnp.issubdtype(result.dtype, jnp.floating) else -7
    return jnp.full(result.shape, value, result.dtype)


def is_interpreted(kernel: Any) -> bool:
    """Tells a kernel that Triton runs in its interpreter."""
    return type(kernel).__name__ == "InterpretedFunction"


def _interpret(kernel, scalars: Mapping[int, int], results, grid: int, aliases: Mapping[int, int], constants, *arrays):
    rest = iter(arrays)
    operands = [scalars[i] if i in scalars else next(rest) for i in range(len(scalars) + len(arrays))]
    outputs: list[np.ndarray | None] = [None] * len(results)
    for operand, result in aliases.items():
        operands[operand] = outputs[result] = np.array(operands[operand])
    for i, result in enumerate(results):
        if outputs[i] is None:
            outputs[i] = np.full(result.shape, np.nan).astype(result.dtype)
            operands.append(outputs[i])
    kernel[(grid,)](*(o if isinstance(o, int) else _HostTensor(np.asarray(o)) for o in operands), **constants)
    return tuple(outputs)


class _HostTensor:
    """A numpy array in the shape of a torch tensor, as far as Triton's interpreter asks for one. It is its storage."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = f"torch.{array.dtype}"

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_HostTensor":
        return self

    def cpu(self) -> "_HostTensor":
        return self

    def new_empty(self, *_: object, **__: object) -> "_HostTensor":
        return self

    def set_(self, *_: object) -> None: ...

    def copy_(self, *_: object) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides
