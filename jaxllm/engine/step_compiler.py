"""Step shapes -> executables. Knows XLA's options and abstract shapes: no weights and no cache need exist yet."""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxllm.engine.buckets import StepShape
from jaxllm.engine.step import RowState, StepProgram, make_step
from jaxllm.engine.step_inputs import packed_size
from jaxllm.models.forward import Weights, weights_tree

logger = logging.getLogger(__name__)


class StepCompiler:
    """Compiles each shape once and keeps it. Threads may ask at the same time: XLA compiles outside Python's lock."""

    def __init__(self, program: StepProgram, num_blocks: int, num_rows: int):
        self.program = program
        self.num_blocks = num_blocks
        self.num_rows = num_rows
        self.largest_temporary = 0  # bytes, of the shapes compiled so far
        self._compiled: dict[StepShape, Callable] = {}
        self._lock = Lock()

    def get(self, shape: StepShape) -> Callable:
        """Gives the executable of a shape, compiling it at first use."""
        return self._compiled.get(shape) or self._compile(shape)

    def warm_up(self, shapes: Iterable[StepShape], num_threads: int) -> None:
        """Compiles shapes ahead of the first request, in parallel."""
        with ThreadPoolExecutor(num_threads, thread_name_prefix="jaxllm-compile") as pool:
            list(pool.map(self.get, shapes))

    def _compile(self, shape: StepShape) -> Callable:
        start = time.perf_counter()
        compiled = compile_step(self.program, shape, self.num_blocks, self.num_rows)
        logger.debug("compiled %s in %.1f s", shape, time.perf_counter() - start)
        with self._lock:
            self.largest_temporary = max(self.largest_temporary, temporary_bytes(compiled))
            return self._compiled.setdefault(shape, compiled)


def compile_step(program: StepProgram, shape: StepShape, num_blocks: int, num_rows: int) -> jax.stages.Compiled:
    """Compiles step(weights, kv, rows, packed) of one shape, with kv and rows donated."""
    whole = program.sharding(PartitionSpec())
    dtype = jnp.dtype(program.decoder.cfg.dtype)
    kv = jax.ShapeDtypeStruct(program.kv_shape(num_blocks), dtype, sharding=program.sharding(program.kv_spec()))
    rows = RowState(jax.ShapeDtypeStruct((num_rows + 1,), jnp.int32, sharding=whole))
    packed = jax.ShapeDtypeStruct((packed_size(shape, program.num_groups),), jnp.int32, sharding=whole)
    step = jax.jit(make_step(program, shape), donate_argnums=(1, 2))
    return step.lower(abstract_weights(program), kv, rows, packed).compile(compiler_options(program))


def abstract_weights(program: StepProgram) -> Weights:
    """The shapes, type and shardings that the weights have."""
    dtype = jnp.dtype(program.decoder.cfg.dtype)
    return weights_tree(
        {
            spec.path: jax.ShapeDtypeStruct(
                spec.stored_shape, dtype, sharding=program.sharding(program.rules.spec(*spec.stored_axes))
            )
            for spec in program.decoder.params
        }
    )


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of scratch that a compiled step takes; 0 where the platform does not say."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def compiler_options(program: StepProgram) -> dict[str, bool | int | str] | None:
    """On a GPU cuBLASLt instead of XLA's Triton GEMMs: they compile for half a minute, to gain at few rows only."""
    return None if program.platform == "cpu" else {"xla_gpu_enable_triton_gemm": False}
