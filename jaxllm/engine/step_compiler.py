"""Shapes -> executables. Knows XLA's options and abstract shapes: no weights and no cache need exist yet."""

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from types import MappingProxyType
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.buckets import StepShape
from jaxllm.engine.executable_store import ExecutableStore
from jaxllm.engine.sampler import make_prompt_scorer, make_sampler
from jaxllm.engine.sampler_inputs import SamplerLayout, SamplerShape
from jaxllm.engine.sampler_rows import NUM_BEST
from jaxllm.engine.step import PEERS, RowState, StepProgram, make_step
from jaxllm.engine.step_inputs import packed_size
from jaxllm.engine.warm_up import WarmUp
from jaxllm.kernels.all_reduce.inbox import num_peer_words
from jaxllm.mesh.caller import without_callers_mesh
from jaxllm.mesh.processes import processes_of
from jaxllm.models.forward import Weights, weights_tree

logger = logging.getLogger(__name__)


# Tracing and lowering are Python: two threads at once take as long, and leave less of its time to whoever serves.
_trace_lock = Lock()
_FREE = nullcontext()
# What XLA records by default, and collectives. As a compiler option the list is taken as it is: "+COLLECTIVES" is not.
_CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,COLLECTIVES"


class SamplerSettings(NamedTuple):
    """What every sampler of an engine is compiled with."""

    logprobs_mode: str = "raw_logprobs"
    processors: Mapping[str, LogitsProcessor] = MappingProxyType({})


class PromptScorerKey(NamedTuple):
    """What a compiled scorer of prompts is kept under."""

    num_tokens: int
    num_scored: int
    num_best: int


class Elsewhere(Protocol):
    """What a compiler asks and tells of the other processes of its engine."""

    def has(self, key: Hashable) -> bool:
        """Says whether each of them has compiled a program, as far as is known here."""
        ...

    def tell(self, key: Hashable) -> None:
        """Notes that this process has compiled one."""
        ...


class _Nowhere:
    """There are no other processes."""

    def has(self, key: Hashable) -> bool:
        return True

    def tell(self, key: Hashable) -> None:
        pass


class StepCompiler:
    """Compiles each program once and keeps it. Threads may ask at the same time: XLA compiles outside Python's lock.

    With a store, programs come from there where it has them, and those that had to be compiled go there.
    """

    def __init__(
        self,
        program: StepProgram,
        num_blocks: int,
        num_rows: int,
        settings: SamplerSettings,
        store: ExecutableStore | None = None,
    ):
        self.program = program
        self.num_blocks = num_blocks
        self.num_rows = num_rows
        self.settings = settings
        self.largest_temporary = 0  # bytes, of the programs compiled so far
        self.num_planned = 0
        self.finished: float | None = None  # when the warm-up ended, in seconds of time.perf_counter()
        self.store = store
        self.elsewhere: Elsewhere = _Nowhere()
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._planned: set[Hashable] = set()  # what the warm-up has not compiled yet
        self._under_way: dict[Hashable, Lock] = {}
        self._lock = Lock()
        self._warm_up: WarmUp[StepShape | SamplerShape] | None = None

    def get(self, shape: StepShape) -> Callable:
        """Gives the forward pass of a shape, compiling it at first use."""
        return self._compiled.get(shape) or self._keep(
            shape, lambda: compile_step(self.program, shape, self.num_blocks, self.num_rows, self._tracing())
        )

    def get_sampler(self, shape: SamplerShape) -> Callable:
        """Gives the sampler of a shape, compiling it at first use."""
        return self._compiled.get(shape) or self._keep(
            shape, lambda: compile_sampler(self.program, shape, self.num_rows, self.settings, self._tracing())
        )

    def get_prompt_scorer(self, num_tokens: int, num_scored: int, num_best: int) -> Callable:
        """Gives the program that scores so many tokens of a step, compiling it at first use."""
        key = PromptScorerKey(num_tokens, num_scored, num_best)
        return self._compiled.get(key) or self._keep(
            key,
            lambda: compile_prompt_scorer(
                self.program, num_tokens, num_scored, num_best, self.settings, self._tracing()
            ),
        )

    def make(self, key: Hashable) -> None:
        """Compiles the program of a key, unless that has happened."""
        match key:
            case StepShape():
                self.get(key)
            case SamplerShape():
                self.get_sampler(key)
            case PromptScorerKey():
                self.get_prompt_scorer(*key)
            case _:
                raise TypeError(f"{key!r} is no key of a program")

    def step_shapes(self) -> list[StepShape]:
        """Lists the shapes whose forward pass is compiled."""
        return [key for key in self._compiled if isinstance(key, StepShape)]

    def texts(self) -> dict[str, Callable[[], str | None]]:
        """Gives for each compiled step, by its name in a trace, what reads its optimised program."""
        shapes = {f"jit_{shape.label}": shape for shape in self.step_shapes()}
        return {name: self._compiled[shape].as_text for name, shape in shapes.items()}

    def stand_in(self, shape: StepShape) -> StepShape:
        """Gives the smallest compiled shape that holds the step, while the warm-up has yet to come to its own.

        It is the shape itself when that is compiled, or is no part of the warm-up, or nothing holds the step so far.
        """
        if not self._planned or self._is_ready(shape):
            return shape
        if shape not in self._planned and shape not in self._compiled:
            return shape
        with self._lock:
            compiled = [key for key in self._compiled if isinstance(key, StepShape)]
        holding = [other for other in compiled if other.holds(shape) and self._is_ready(other)]
        return min(holding, key=lambda s: (*s[:3], s.variant != shape.variant), default=shape)

    def warm_up(self, shapes: Iterable[StepShape | SamplerShape], num_threads: int) -> None:
        """Begins to compile programs ahead of their use, in this order, in threads of its own."""
        shapes = list(dict.fromkeys(shapes))
        self.num_planned = len(shapes)
        self._planned |= set(shapes)
        self._warm_up = WarmUp(self._make, shapes, num_threads, self._finish)
        self._warm_up.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the warm-up; False if it takes longer than the timeout in seconds."""
        return self._warm_up is None or self._warm_up.wait(timeout)

    def progress(self, began: float) -> str:
        """Says how far the warm-up is, or when it ended, in seconds since `began` of time.perf_counter()."""
        stored = f", {self.store.num_loaded} of them loaded" if self.store is not None else ""
        if self.finished is not None:
            return f"all {self.num_planned} after {self.finished - began:.1f} s{stored}"
        return f"{self.num_planned - len(self._planned)} of {self.num_planned}{stored}; the others follow behind"

    def close(self) -> None:
        """Ends the warm-up; what is being compiled just now is waited for."""
        if self._warm_up is not None:
            self._warm_up.stop()

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        """One thread's turn to trace."""
        with _trace_lock, without_callers_mesh():
            if self._warm_up is not None and self._warm_up.is_stopping.is_set():
                raise RuntimeError("the engine was closed")
            yield

    def _make(self, shape: StepShape | SamplerShape) -> None:
        try:
            self.make(shape)
        finally:
            with self._lock:
                self._planned.discard(shape)

    def _finish(self) -> None:
        if not self._planned:
            self.finished = time.perf_counter()
            logger.info("all %d programs are ready", self.num_planned)

    def _is_ready(self, shape: StepShape) -> bool:
        """Tells a compiled forward pass; one of the variant "logits" waits for the usual samplers of its size."""
        if shape not in self._compiled or not self.elsewhere.has(shape):
            return False
        if shape.variant == "greedy":
            return True
        return not any(key in self._planned for key in usual_samplers(shape.num_requests))

    def _keep(self, key: Hashable, compile_program: Callable[[], jax.stages.Compiled]) -> Callable:
        with self._lock:
            turn = self._under_way.setdefault(key, Lock())
        with turn:  # whoever asks for what another thread compiles waits for it
            if key not in self._compiled:
                start = time.perf_counter()
                store = self.store if self.store is not None and _can_be_stored(key) else None
                compiled = store.load(key) if store is not None else None
                was_stored = compiled is not None
                if compiled is None:
                    compiled = compile_program() if store is None else store.compile(key, compile_program)
                seconds = time.perf_counter() - start
                logger.debug("%s %s in %.1f s", "loaded" if was_stored else "compiled", key, seconds)
                with self._lock:
                    self.largest_temporary = max(self.largest_temporary, temporary_bytes(compiled))
                    self._compiled[key] = compiled
                self.elsewhere.tell(key)
                if store is not None and not was_stored:
                    store.save(key, compiled)
            return self._compiled[key]


def _can_be_stored(key: Hashable) -> bool:
    """A user's own functions are in some samplers, and nothing tells whether they have changed since."""
    return not (isinstance(key, SamplerShape) and key.processors)


def usual_samplers(num_requests: int) -> tuple[SamplerShape, ...]:
    """The samplers of a batch that are compiled ahead: plain, with filters, and with the scores of a few tokens.

    Rarer ones (penalties, edits, masks) compile in a second or less when the first request asks for them.
    """
    return (
        SamplerShape(num_requests),
        SamplerShape(num_requests, filters=True),
        SamplerShape(num_requests, num_best=NUM_BEST[0]),
    )


def compile_step(
    program: StepProgram,
    shape: StepShape,
    num_blocks: int,
    num_rows: int,
    tracing: AbstractContextManager = _FREE,
) -> jax.stages.Compiled:
    """Compiles step(weights, kv, rows, packed[, peers]) of one shape; kv is donated, rows if it gives new ones."""
    kv_sharding = program.sharding(program.kv_spec())
    kv = jax.ShapeDtypeStruct(program.kv_shape(num_blocks), program.kv_dtype, sharding=kv_sharding)
    rows = RowState(program.of_rank((num_rows + 1,), jnp.int32))
    packed = program.of_rank((packed_size(shape, program.num_groups),), jnp.int32)
    donated = (1, 2) if shape.variant == "greedy" else (1,)
    step = jax.jit(make_step(program, shape), donate_argnums=donated)
    with tracing:
        lowered = step.lower(abstract_weights(program), kv, rows, packed, *_abstract_peers(program))
    return lowered.compile(compiler_options(program))


def compile_sampler(
    program: StepProgram,
    shape: SamplerShape,
    num_rows: int,
    settings: SamplerSettings,
    tracing: AbstractContextManager = _FREE,
) -> jax.stages.Compiled:
    """Compiles sample(logits, rows, [counts,] packed) of one shape, with rows and counts donated."""
    vocab_size = program.decoder.cfg.vocab_size
    layout = SamplerLayout(shape, vocab_size, settings.processors)
    logits = program.of_rank((shape.num_requests, program.logits_width), jnp.float32, program.logits_spec())
    rows = RowState(program.of_rank((num_rows + 1,), jnp.int32))
    counts = [program.of_rank((num_rows + 1, vocab_size), jnp.int32)] if shape.penalties else []
    packed = program.of_rank((layout.packed_size,), jnp.int32)
    donated = (1, 2) if shape.penalties else (1,)
    sampler = jax.jit(make_sampler(program, layout, settings.logprobs_mode), donate_argnums=donated)
    with tracing:
        lowered = sampler.lower(logits, rows, *counts, packed)
    return lowered.compile(compiler_options(program))


def compile_prompt_scorer(
    program: StepProgram,
    num_tokens: int,
    num_scored: int,
    num_best: int,
    settings: SamplerSettings,
    tracing: AbstractContextManager = _FREE,
) -> jax.stages.Compiled:
    """Compiles score(weights, hidden, index_and_token) for so many tokens of a step."""
    cfg = program.decoder.cfg
    hidden = program.of_rank((num_tokens, cfg.d_model), jnp.dtype(cfg.dtype))
    chosen = program.of_rank((2, num_scored), jnp.int32)
    scorer = jax.jit(make_prompt_scorer(program, num_best, settings.logprobs_mode))
    with tracing:
        lowered = scorer.lower(abstract_weights(program), hidden, chosen)
    return lowered.compile(compiler_options(program))


def _abstract_peers(program: StepProgram) -> list[jax.ShapeDtypeStruct]:
    """The words of a PeerMemory, where the step takes them."""
    if not program.writes_to_peers:
        return []
    num_ranks = program.mesh.shape["tensor"]
    return [program.of_rank((num_ranks, num_peer_words(num_ranks)), jnp.int32, PEERS)]


def abstract_params(program: StepProgram) -> list[jax.ShapeDtypeStruct]:
    """The shape, type and sharding of each parameter, in the decoder's order."""
    dtype = jnp.dtype(program.decoder.cfg.dtype)
    return [
        jax.ShapeDtypeStruct(spec.stored_shape, dtype, sharding=program.sharding(program.rules.spec(*spec.stored_axes)))
        for spec in program.decoder.params
    ]


def abstract_weights(program: StepProgram) -> Weights:
    """The shapes, type and shardings that the weights have."""
    paths = [spec.path for spec in program.decoder.params]
    return weights_tree(dict(zip(paths, abstract_params(program), strict=True)))


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of scratch that a compiled step takes; 0 where the platform does not say."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def compiler_options(program: StepProgram) -> dict[str, bool | int | str] | None:
    """On a GPU cuBLASLt instead of XLA's Triton GEMMs: they compile for half a minute, to gain at few rows only.

    Nor does XLA make arrays anew in each layer to save memory: it counts the cache twice, as input and as output, and
    finds that the card is full.
    """
    if program.platform == "cpu":
        return None
    options: dict[str, bool | int | str] = {
        "xla_gpu_enable_triton_gemm": False,
        "xla_disable_hlo_passes": "rematerialization",
    }
    if len(processes_of(program.mesh)) > 1:  # else they would wait for each other's share of it, in every program
        options["xla_gpu_shard_autotuning"] = False
    return options | ({"xla_gpu_enable_command_buffer": _CAPTURED} if program.capture_collectives else {})
