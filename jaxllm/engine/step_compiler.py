"""Shapes -> executables. Knows XLA's options and abstract shapes: no weights and no cache need exist yet."""

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.buckets import StepShape
from jaxllm.engine.sampler import make_prompt_scorer, make_sampler
from jaxllm.engine.sampler_inputs import SamplerLayout, SamplerShape
from jaxllm.engine.step import RowState, StepProgram, make_step
from jaxllm.engine.step_inputs import packed_size
from jaxllm.models.forward import Weights, weights_tree

logger = logging.getLogger(__name__)


class SamplerSettings(NamedTuple):
    """What every sampler of an engine is compiled with."""

    logprobs_mode: str = "raw_logprobs"
    processors: Mapping[str, LogitsProcessor] = MappingProxyType({})


class StepCompiler:
    """Compiles each program once and keeps it. Threads may ask at the same time: XLA compiles outside Python's lock."""

    def __init__(self, program: StepProgram, num_blocks: int, num_rows: int, settings: SamplerSettings):
        self.program = program
        self.num_blocks = num_blocks
        self.num_rows = num_rows
        self.settings = settings
        self.largest_temporary = 0  # bytes, of the programs compiled so far
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._lock = Lock()

    def get(self, shape: StepShape) -> Callable:
        """Gives the forward pass of a shape, compiling it at first use."""
        return self._compiled.get(shape) or self._keep(
            shape, lambda: compile_step(self.program, shape, self.num_blocks, self.num_rows)
        )

    def get_sampler(self, shape: SamplerShape) -> Callable:
        """Gives the sampler of a shape, compiling it at first use."""
        return self._compiled.get(shape) or self._keep(
            shape, lambda: compile_sampler(self.program, shape, self.num_rows, self.settings)
        )

    def get_prompt_scorer(self, num_tokens: int, num_scored: int, num_best: int) -> Callable:
        """Gives the program that scores so many tokens of a step, compiling it at first use."""
        key = ("prompt scorer", num_tokens, num_scored, num_best)
        return self._compiled.get(key) or self._keep(
            key, lambda: compile_prompt_scorer(self.program, num_tokens, num_scored, num_best, self.settings)
        )

    def texts(self) -> dict[str, Callable[[], str | None]]:
        """Gives for each compiled step, by its name in a trace, what reads its optimised program."""
        shapes = {f"jit_{key.label}": key for key in self._compiled if isinstance(key, StepShape)}
        return {name: self._compiled[shape].as_text for name, shape in shapes.items()}

    def warm_up(self, shapes: Iterable[StepShape | SamplerShape], num_threads: int) -> None:
        """Compiles programs ahead of the first request, in parallel."""
        with ThreadPoolExecutor(num_threads, thread_name_prefix="jaxllm-compile") as pool:
            list(pool.map(lambda s: self.get(s) if isinstance(s, StepShape) else self.get_sampler(s), shapes))

    def _keep(self, key: Hashable, compile_program: Callable[[], jax.stages.Compiled]) -> Callable:
        start = time.perf_counter()
        compiled = compile_program()
        logger.debug("compiled %s in %.1f s", key, time.perf_counter() - start)
        with self._lock:
            self.largest_temporary = max(self.largest_temporary, temporary_bytes(compiled))
            return self._compiled.setdefault(key, compiled)


def compile_step(program: StepProgram, shape: StepShape, num_blocks: int, num_rows: int) -> jax.stages.Compiled:
    """Compiles step(weights, kv, rows, packed) of one shape, with kv donated, and rows where it gives new ones."""
    kv_sharding = program.sharding(program.kv_spec())
    kv = jax.ShapeDtypeStruct(program.kv_shape(num_blocks), program.kv_dtype, sharding=kv_sharding)
    rows = RowState(_whole(program, (num_rows + 1,), jnp.int32))
    packed = _whole(program, (packed_size(shape, program.num_groups),), jnp.int32)
    donated = (1, 2) if shape.variant == "greedy" else (1,)
    step = jax.jit(make_step(program, shape), donate_argnums=donated)
    return step.lower(abstract_weights(program), kv, rows, packed).compile(compiler_options(program))


def compile_sampler(
    program: StepProgram, shape: SamplerShape, num_rows: int, settings: SamplerSettings
) -> jax.stages.Compiled:
    """Compiles sample(logits, rows, [counts,] packed) of one shape, with rows and counts donated."""
    vocab_size = program.decoder.cfg.vocab_size
    layout = SamplerLayout(shape, vocab_size, settings.processors)
    logits = _whole(program, (shape.num_requests, vocab_size), jnp.float32)
    rows = RowState(_whole(program, (num_rows + 1,), jnp.int32))
    counts = [_whole(program, (num_rows + 1, vocab_size), jnp.int32)] if shape.penalties else []
    packed = _whole(program, (layout.packed_size,), jnp.int32)
    donated = (1, 2) if shape.penalties else (1,)
    sampler = jax.jit(make_sampler(program, layout, settings.logprobs_mode), donate_argnums=donated)
    return sampler.lower(logits, rows, *counts, packed).compile(compiler_options(program))


def compile_prompt_scorer(
    program: StepProgram, num_tokens: int, num_scored: int, num_best: int, settings: SamplerSettings
) -> jax.stages.Compiled:
    """Compiles score(weights, hidden, index_and_token) for so many tokens of a step."""
    cfg = program.decoder.cfg
    hidden = _whole(program, (num_tokens, cfg.d_model), jnp.dtype(cfg.dtype))
    chosen = _whole(program, (2, num_scored), jnp.int32)
    scorer = jax.jit(make_prompt_scorer(program, num_best, settings.logprobs_mode))
    return scorer.lower(abstract_weights(program), hidden, chosen).compile(compiler_options(program))


def _whole(program: StepProgram, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=program.sharding(PartitionSpec()))


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
