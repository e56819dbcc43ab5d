"""EngineArgs + checkpoint -> a running engine, in the order of a start. Knows all parts; runs no step."""

import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxlib._jax import Device

from jaxllm.config.engine_args import DTYPES, KV_CACHE_DTYPES, EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.config.logits_processor import load_processors
from jaxllm.engine.buckets import Buckets, StepShape, make_buckets
from jaxllm.engine.compiled_for import compiled_for
from jaxllm.engine.engine import Engine
from jaxllm.engine.executable_store import ExecutableStore
from jaxllm.engine.generation_config import sampling_defaults
from jaxllm.engine.given_weights import show_taken, take_weights
from jaxllm.engine.input_builder import InputBuilder
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.memory import MemoryPlan, bytes_per_device, plan_memory, show_bytes, temporaries_bound
from jaxllm.engine.model_runner import ModelRunner, Runner
from jaxllm.engine.model_source import ModelSource, checkpoint_pieces
from jaxllm.engine.peer_memory import can_write_to_peers
from jaxllm.engine.processes.group import ProcessGroup
from jaxllm.engine.processes.leader import CompiledElsewhere, LeadingRunner
from jaxllm.engine.sampler_inputs import SamplerShape
from jaxllm.engine.step import StepProgram
from jaxllm.engine.step_compiler import (
    SamplerSettings,
    StepCompiler,
    abstract_weights,
    usual_samplers,
)
from jaxllm.engine.step_inputs import packed_size
from jaxllm.engine.watchdog import Watchdog
from jaxllm.kernels.all_reduce.inbox import inbox_words
from jaxllm.kernels.select import select
from jaxllm.mesh.adopt import Adopted
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
from jaxllm.mesh.processes import local_devices, ordered_devices
from jaxllm.models.checkpoint.orbax_folder import OrbaxFolder
from jaxllm.models.config import ModelConfig
from jaxllm.models.forward import Weights, build_program
from jaxllm.models.hf_config import token_ids
from jaxllm.models.loader import dummy_weights, load_weights
from jaxllm.models.read_config import read_config
from jaxllm.models.step_context import Kernels
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.policy import policy_named
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig

logger = logging.getLogger(__name__)


_DEFAULT_LIMITS = {"cpu": (32, 512)}  # max_num_seqs, max_num_batched_tokens
_GPU_LIMITS = (256, 8192)


@dataclass(slots=True)
class StartTimes:
    """Seconds of a start by phase, in order."""

    began: float = field(default_factory=time.perf_counter)
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the body's time to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is decided before anything is compiled or read."""

    model: ModelConfig
    memory: MemoryPlan
    buckets: Buckets
    compiler: StepCompiler
    max_num_batched_tokens: int
    weights: Adopted | None = None  # those of a given model

    def plan(self) -> tuple[list[StepShape | SamplerShape], list[StepShape | SamplerShape]]:
        """Lists the shapes that a first answer waits for, and those that are compiled behind it."""
        return _plan(self.buckets, self.compiler.program.platform)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """A running engine and what a start reports. Shapes that a first answer can do without may still be compiled."""

    engine: Engine
    runner: ModelRunner
    compiler: StepCompiler
    model: ModelConfig
    memory: MemoryPlan
    buckets: Buckets
    times: StartTimes
    sampling_defaults: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    given: Adopted | None = None  # the weights, where the caller's program holds them
    processes: ProcessGroup | None = None  # of several

    def report(self) -> list[tuple[str, str]]:
        """The start-up table: memory, then seconds by phase."""
        spent = [f"{name} {seconds:.1f}" for name, seconds in self.times.phases.items() if seconds >= 0.05]
        total = sum(self.times.phases.values())
        held = [] if self.given is None else [("weights held", show_taken(self.given))]
        rows = [*held, *self.memory.rows(), ("start", f"{total:.1f} s: {', '.join(spent)}")]
        if self.compiler.num_planned:
            rows.append(("programs", self.compiler.progress(self.times.began)))
        return rows

    def wait_until_compiled(self, timeout: float | None = None) -> bool:
        """Waits until every planned shape is compiled; False if that takes longer than the timeout in seconds."""
        return self.compiler.wait(timeout)

    def close(self) -> None:
        self.engine.close()
        self.compiler.close()
        self.runner.close()
        if self.processes is not None:
            self.processes.stop()


def build_engine(
    args: EngineArgs,
    source: ModelSource,
    *,
    eos_token_ids: tuple[int, ...] = (),
    mesh: Mesh | None = None,
    times: StartTimes | None = None,
    processes: ProcessGroup | None = None,
) -> BuiltEngine:
    """Loads the weights, compiles what a first request needs, sizes the pool and joins the parts.

    `eos_token_ids` are the tokenizer's; those of config.json and generation_config.json are added.

    Raises:
        InputError: the model or the flags do not fit the device.
    """
    times = times or StartTimes()
    if isinstance(args.scheduling_policy, str):  # a Python program may pass a policy of its own
        policy_named(args.scheduling_policy)
    prepared, runner = build_runner(args, source, times, mesh, processes)
    steps: Runner = runner
    if processes is not None:
        with times.phase("other processes"):
            processes.wait_for_start()
        assert isinstance(processes.elsewhere, CompiledElsewhere)
        steps = LeadingRunner(runner, prepared.compiler, processes.channel, processes.elsewhere)
    memory = _compare(prepared.memory, prepared.compiler)
    engine = _join(args, source, prepared, steps, eos_token_ids)
    return BuiltEngine(
        engine=engine,
        runner=runner,
        compiler=prepared.compiler,
        model=prepared.model,
        memory=memory,
        buckets=prepared.buckets,
        times=times,
        sampling_defaults=sampling_defaults(source.generation_config),
        given=prepared.weights and prepared.weights._replace(tree=None),
        processes=processes,
    )


def build_runner(
    args: EngineArgs,
    source: ModelSource,
    times: StartTimes,
    mesh: Mesh | None = None,
    processes: ProcessGroup | None = None,
) -> tuple[Prepared, ModelRunner]:
    """Loads the weights and compiles what a first request needs: the part of a start that every process has.

    Raises:
        InputError: the model or the flags do not fit the device.
    """
    with times.phase("devices"):
        mesh = mesh or mesh_of(args, ordered_devices())
    prepared = prepare(args, source, mesh)
    if processes is not None:
        prepared = _agreed(args, source, prepared, processes)
    compiler = prepared.compiler
    first, rest = ([], []) if args.enforce_eager else prepared.plan()
    compiler.warm_up([*first, *rest], max(1, (os.cpu_count() or 2) // 2))  # while the weights are read, and beyond
    try:
        with times.phase("weights"):
            weights = prepared.weights.tree if prepared.weights else _weights(args, source, compiler.program)
        with times.phase("KV pool"):
            runner = ModelRunner(compiler, weights, _largest_input(prepared))
        with times.phase("compile (beyond the weights)"):
            for shape in first:
                compiler.make(shape)
    except BaseException:
        compiler.close()
        raise
    return prepared, runner


def _agreed(args: EngineArgs, source: ModelSource, prepared: Prepared, processes: ProcessGroup) -> Prepared:
    """What all processes can do alike: the one with the least memory decides how many blocks there are."""
    compiler, own = prepared.compiler, prepared.memory.num_blocks
    facts = compiled_for(compiler.program, own, compiler.num_rows, compiler.settings)
    num_blocks = processes.agree(facts, own)
    if num_blocks != own:
        args = dataclasses.replace(args, num_gpu_blocks_override=num_blocks)
        prepared = prepare(args, source, compiler.program.mesh)
    prepared.compiler.elsewhere = processes.elsewhere
    return prepared


def mesh_of(args: EngineArgs, devices: Sequence[Device] | None = None) -> Mesh:
    """Lays out the devices as the flags say.

    Raises:
        InputError: there are too few of them.
    """
    try:
        return build_mesh(args.data_parallel_size, args.tensor_parallel_size, devices)
    except ValueError as error:
        count = args.data_parallel_size * args.tensor_parallel_size
        more = f", or set XLA_FLAGS=--xla_force_host_platform_device_count={count} for virtual ones"
        more = more if jax.default_backend() == "cpu" else ""
        raise InputError(f"{error}: lower data_parallel_size or tensor_parallel_size{more}") from None


def prepare(args: EngineArgs, source: ModelSource, mesh: Mesh) -> Prepared:
    """Decides everything that programs depend on: kernels, memory, shapes. Nothing is compiled, no weight is read.

    The weights of a given model are taken first: what they leave of the memory is known afterwards.

    Raises:
        InputError: the model or the flags do not fit the device.
    """
    platform = mesh.devices.flat[0].platform
    model = _model_config(args, source, platform).split(mesh.shape["tensor"])
    program = _step_program(args, source, model, mesh, platform)
    given = source.given and take_weights(program, source.given.params)
    max_seqs, max_tokens = _DEFAULT_LIMITS.get(platform, _GPU_LIMITS)
    max_seqs, max_tokens = args.max_num_seqs or max_seqs, args.max_num_batched_tokens or max_tokens
    settings = SamplerSettings(args.logprobs_mode, load_processors(args.logits_processors))
    memory = plan_memory(
        args,
        model,
        local_devices(mesh),
        num_shares=mesh.shape["tensor"],
        weights=bytes_per_device(abstract_weights(program)),
        temporaries=0 if platform == "cpu" else temporaries_bound(model, max_tokens, max_seqs, mesh.shape["tensor"]),
        chunk=max_tokens,
        inbox=4 * inbox_words(mesh.shape["tensor"]) if program.writes_to_peers else 0,
        kv_dtype=program.kv_dtype.name,
        are_there=given is not None,
    )
    max_blocks = -(-memory.max_model_len // args.block_size)
    store = _store(args, program, memory.num_blocks, max_seqs, settings)
    return Prepared(
        model=model,
        memory=memory,
        buckets=make_buckets(max_seqs, max_tokens, max_blocks, coarse=platform == "cpu"),
        compiler=StepCompiler(program, memory.num_blocks, max_seqs, settings, store),
        max_num_batched_tokens=max_tokens,
        weights=given,
    )


def _largest_input(prepared: Prepared) -> int:
    """The size in bytes of the largest packed step."""
    num_groups = prepared.compiler.program.num_groups
    return 4 * max(packed_size(shape, num_groups) for shape in prepared.buckets.plan())


def _join(
    args: EngineArgs,
    source: ModelSource,
    prepared: Prepared,
    runner: Runner,
    eos_token_ids: tuple[int, ...],
) -> Engine:
    """Joins scheduler, input builder and runner."""
    model, memory, compiler = prepared.model, prepared.memory, prepared.compiler
    max_seqs, max_tokens, buckets = compiler.num_rows, prepared.max_num_batched_tokens, prepared.buckets
    pace = None
    if args.target_tpot_ms is not None:
        pace = Pace(args.target_tpot_ms / 1e3, buckets.mixed_sizes, buckets.decode_size)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=max_tokens,
            max_model_len=memory.max_model_len,
            policy=args.scheduling_policy,
            enable_prefix_caching=args.enable_prefix_caching,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            max_prefill_tokens=args.max_prefill_tokens,
            step_sizes=buckets.fillable,
        ),
        [BlockPool(memory.num_blocks, args.block_size) for _ in range(compiler.program.num_ranks)],
        KVGroups(model.kv_layout.windows),
        pace,
    )
    max_blocks = -(-memory.max_model_len // args.block_size)
    builder = InputBuilder(
        buckets,
        max_seqs,
        max_blocks,
        len(model.kv_layout.windows),
        vocab_size=model.vocab_size,
        num_ranks=compiler.program.num_ranks,
        seed=args.seed,
        processors=compiler.settings.processors,
        choose=compiler.stand_in,
    )
    eos = {*eos_token_ids, *model.eos_token_ids, *token_ids(source.generation_config.get("eos_token_id"))}
    limits = EngineLimits(
        vocab_size=model.vocab_size,
        max_model_len=memory.max_model_len,
        eos_token_ids=tuple(sorted(eos)),
        has_priorities=not isinstance(args.scheduling_policy, str) or "priority" in args.scheduling_policy,
        max_logprobs=args.max_logprobs,
        max_running=max_seqs * compiler.program.num_ranks,
        processors=compiler.settings.processors,
    )
    return Engine(scheduler, builder, runner, limits, Watchdog(args.step_timeout), pace)


def _model_config(args: EngineArgs, source: ModelSource, platform: str) -> ModelConfig:
    if source.given is not None:
        model = source.given.cfg
    else:
        assert source.family is not None
        model = read_config(source.family, source.hf_config, overridden=frozenset(args.hf_overrides or ()))
    if args.max_model_len is not None and args.max_model_len > model.max_position:
        raise InputError(f"max_model_len {args.max_model_len:,} is beyond the model's {model.max_position:,} positions")
    model = model.at_length(args.max_model_len or model.max_position)
    if source.given is not None and args.dtype == "auto":
        return dataclasses.replace(model, dtype=source.given.dtype)
    return dataclasses.replace(model, dtype=_resolve_dtype(args.dtype, model.dtype, platform))


def _resolve_dtype(wanted: str, stored: str, platform: str) -> str:
    """Auto is float32 on a CPU (bfloat16 is several times slower there), the checkpoint's 16-bit type on a GPU."""
    if wanted != "auto":
        return DTYPES[wanted]
    if platform == "cpu":
        return "float32"
    return "float16" if stored == "float16" else "bfloat16"


def _step_program(args: EngineArgs, source: ModelSource, model: ModelConfig, mesh: Mesh, platform: str) -> StepProgram:
    writes_to_peers = platform == "gpu" and not args.disable_custom_all_reduce and can_write_to_peers(mesh)
    preferred = {"paged_attention": args.attention_backend, "plan_attention": args.attention_backend}
    preferred["all_reduce"] = "auto" if writes_to_peers else "reference"
    try:
        kernels = Kernels(
            *(select(name, platform=platform, preferred=preferred.get(name, "auto")) for name in Kernels._fields)
        )
    except ValueError as error:
        raise InputError(f"attention_backend: {error}") from None
    if KV_CACHE_DTYPES[args.kv_cache_dtype] == KV_CACHE_DTYPES["fp8"]:
        logger.info("KV cache: keys and values in 8 bits (e4m3), not scaled; what is beyond 448 is cut off")
    given = source.given
    return StepProgram(
        build_program(model, separate=platform == "cpu") if given is None else given.build_program(model),
        kernels,
        mesh,
        AxisRules(),
        args.block_size,
        KV_CACHE_DTYPES[args.kv_cache_dtype],
        args.capture_collectives,
    )


def _weights(args: EngineArgs, source: ModelSource, program: StepProgram) -> Weights:
    dtype = jnp.dtype(program.decoder.cfg.dtype)

    def sharding(spec):
        return program.sharding(program.rules.spec(*spec.stored_axes))

    if args.load_format == "dummy" or source.checkpoint is None or source.family is None:
        return dummy_weights(program.decoder, dtype, sharding, args.seed)
    pieces = checkpoint_pieces(source.checkpoint, source.family, program.decoder.cfg.unsplit())
    weights = load_weights(program.decoder, source.checkpoint, pieces, dtype, sharding, args.use_tqdm_on_load)
    if isinstance(source.checkpoint, OrbaxFolder):
        source.checkpoint.release()
    return weights


def _store(
    args: EngineArgs, program: StepProgram, num_blocks: int, num_rows: int, settings: SamplerSettings
) -> ExecutableStore | None:
    if args.executables is None:
        return None
    if args.nnodes > 1:
        logger.info("executables=%s: programs of several processes are neither stored nor loaded", args.executables)
        return None
    facts = compiled_for(program, num_blocks, num_rows, settings)
    return ExecutableStore(Path(args.executables).expanduser(), facts, list(program.mesh.devices.flat))


def _compare(memory: MemoryPlan, compiler: StepCompiler) -> MemoryPlan:
    """Puts what the first programs say they need in the place of the bound, and warns where the bound was none."""
    program = compiler.program
    width = program.logits_width // program.mesh.shape["tensor"]
    logits = compiler.num_rows * width * 4  # they stay while the sampler runs
    needed = logits + compiler.largest_temporary if compiler.largest_temporary else memory.temporaries
    if memory.device and needed > memory.temporaries:
        logger.warning(
            "the largest step takes %s beside weights and KV pool, %s more than planned; should memory run out, lower "
            "gpu_memory_utilization or max_num_batched_tokens",
            show_bytes(needed),
            show_bytes(needed - memory.temporaries),
        )
    return dataclasses.replace(memory, temporaries=needed)


def _plan(buckets: Buckets, platform: str) -> tuple[list[StepShape | SamplerShape], list[StepShape | SamplerShape]]:
    """What a first answer waits for, and what is compiled behind it.

    On a GPU a few large shapes hold every step until its own is compiled, small ones first. On a CPU it is the two of a
    short, greedy request: all else compiles at first use, since there are no cores to spare.
    """
    if platform == "cpu":
        width, prompt = buckets.table_widths[-1], buckets.mixed_tokens[min(1, len(buckets.mixed_tokens) - 1)]
        return [buckets.shape(tokens, 1, width, "greedy") for tokens in (prompt, 1)], []
    covering = buckets.covering()
    sizes = {shape.num_requests for shape in covering}
    first = [*covering, *(sampler for size in sizes for sampler in usual_samplers(size))]
    rest: list[StepShape | SamplerShape] = []
    # Mixed steps are long: until the last, a sampler of its own costs a greedy one little.
    for shape in sorted(buckets.plan(), key=lambda s: (s.program, s.variant) == ("mixed", "greedy")):
        rest += usual_samplers(shape.num_requests) if shape.variant == "logits" else ()
        rest.append(shape)
    return first, rest
