"""A Triton kernel -> a custom call of XLA: compiles the kernel with Triton, and packs what jaxlib launches.

Knows Triton's compiler and jaxlib's launcher. Refuses to know how results are named or tested.

The launcher finds a kernel in each step, on each device, by all the bytes that it was packed into, under one lock. So
little is packed: no listing of Triton's, and assembly without comments and notes for debuggers.
"""

import functools
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import triton
from jaxlib import gpu_triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = "triton_kernel_call_ffi"
CONSTANT = "constexpr"  # the type of what is known when compiling
ALIGNMENT = 16  # bytes, of arrays, in what Triton takes for granted of them
TYPES = {
    "bool": "i1",
    "int8": "i8",
    "uint8": "u8",
    "int32": "i32",
    "uint32": "u32",
    "float8_e4m3fn": "fp8e4nv",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
}
_NOTES = re.compile(r"//[^\n]*|^\s*\.loc\s[^\n]*\n", re.MULTILINE)  # not labels: they part what may be reordered


class Compiled(NamedTuple):
    """A kernel's assembly and what a launch of it needs."""

    name: str
    num_warps: int
    shared_bytes: int
    ptx: str
    capability: int
    scratch: tuple[int, ...]  # bytes and alignment of memory for all programs, where there is any


def call(
    kernel: Any,
    operands: Sequence[jax.Array | int],
    results: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    aliases: Mapping[int, int],
    constants: Mapping[str, Any],
    *,
    capability: int,
    **options: Any,
) -> Sequence[jax.Array]:
    """Gives the results, those in place last; `aliases` says which operand each of those is.

    The kernel's arguments are the operands, then the other results. Options are those of Triton's CUDA backend.
    """
    fresh = [result for i, result in enumerate(results) if i not in aliases.values()]
    names = [param.name for param in kernel.params if param.name not in constants]
    arguments = dict(zip(names, (*operands, *fresh), strict=True))
    types = tuple((name, _type(argument)) for name, argument in arguments.items())
    compiled = compile_kernel(kernel, types, tuple(constants.items()), capability, tuple(sorted(options.items())))
    numbers = tuple(
        argument if isinstance(argument, int) else None
        for (_, type), argument in zip(types, arguments.values(), strict=True)
        if type != CONSTANT
    )
    arrays = [operand for operand in operands if not isinstance(operand, int)]
    place = {i: sum(not isinstance(o, int) for o in operands[:i]) for i in aliases}
    launch = jax.ffi.ffi_call(
        TARGET, tuple(results), input_output_aliases={place[i]: result for i, result in aliases.items()}
    )
    with jax.named_scope(compiled.name):
        return launch(*arrays, opaque=_packed(compiled, grid, numbers))


def _type(argument: Any) -> str:
    """What Triton compiles an argument for: a pointer, a number, or the constant 1."""
    if not isinstance(argument, int):
        return "*" + TYPES[argument.dtype.name]
    if argument == 1:
        return CONSTANT
    return "i32" if abs(argument) < 1 << 31 else "i64"


@functools.lru_cache(maxsize=1024)
def compile_kernel(
    kernel: Any, types: tuple[tuple[str, str], ...], constants: tuple, capability: int, options: tuple
) -> Compiled:
    """Compiles a kernel for arguments of these types, once."""
    places = {param.name: (i,) for i, param in enumerate(kernel.params)}
    signature = dict.fromkeys(places, CONSTANT) | dict(types)
    values = {places[name]: value for name, value in constants} | {places[n]: 1 for n, t in types if t == CONSTANT}
    attributes = {places[name]: [["tt.divisibility", ALIGNMENT]] for name, type in types if type.startswith("*")}
    source = ASTSource(kernel, signature, values, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    about = made.metadata
    scratch = getattr(about, "global_scratch_size", 0) or 0
    return Compiled(
        about.name,
        about.num_warps,
        about.shared,
        shortened(made.asm["ptx"]),
        capability,
        (scratch, about.global_scratch_align) if scratch else (),
    )


def shortened(ptx: str) -> str:
    """Leaves comments and what debuggers read out of a kernel's assembly; what is executed stays the same."""
    code = ptx[: end + 2] if (end := ptx.rfind("\n}\n", 0, _first_note(ptx))) >= 0 else ptx
    code = _NOTES.sub("", code)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip()) + "\n"


def _first_note(ptx: str) -> int:
    """Where the files and sections for debuggers begin, behind the code."""
    found = re.search(r"^\s*\.(?:file|section)\s", ptx, re.MULTILINE)
    return found.start() if found else len(ptx)


@functools.lru_cache(maxsize=1024)
def _packed(compiled: Compiled, grid: int, numbers: tuple[int | None, ...]) -> bytes:
    """A launch with these numbers, and with an array for each None, once for all layers."""
    parameters = [
        gpu_triton.create_array_parameter(0, ALIGNMENT)
        if number is None
        else gpu_triton.create_scalar_parameter(number, _type(number))
        for number in numbers
    ]
    kernel = gpu_triton.TritonKernel(
        compiled.name,
        compiled.num_warps,
        1,  # blocks of a cluster
        compiled.shared_bytes,
        compiled.ptx,
        "",
        compiled.capability,
        *compiled.scratch,
    )
    launch = gpu_triton.TritonKernelCall(kernel, grid, 1, 1, parameters)
    return zlib.compress(launch.to_proto(compiled.name, b""), 9)
