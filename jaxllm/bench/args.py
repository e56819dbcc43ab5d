"""The flags of `jaxllm bench`, with vLLM's names where it has them. Knows names, types and ranges: measures nothing."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.config.engine_args import HIDDEN, EngineArgs, engine_args, flag
from jaxllm.config.errors import InputError
from jaxllm.options import OptionParser, add_hidden_options, add_options

ENGINES = ("jaxllm", "hf", "both")
HF_MODES = ("static", "continuous")
WORKLOAD_NAMES = ("L1", "L8", "W1", "W2", "W3", "H1")

_ENGINE_HELP = "what to measure: jaxllm, hf (transformers, which needs torch), or both, one after the other"
_WORKLOAD_HELP = f"workloads of the comparison, several if you like: {', '.join(WORKLOAD_NAMES)}"
_PROFILE_HELP = "folder for a jax profiler trace and tables of where a step's time goes, taken after the measurement"
_PROFILE_STEPS_HELP = "steps to trace at the start of a workload, and as many in its middle"
_HF_MODES_HELP = "static (batches padded to their longest request) and/or continuous (its own batching)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputArgs:
    """Flags of `bench throughput`.

    Raises:
        InputError: a value out of range, or two that contradict each other.
    """

    engine: str = flag("jaxllm", _ENGINE_HELP)
    workload: tuple[str, ...] = flag((), _WORKLOAD_HELP)
    dataset_name: str = flag("random", "where requests come from without --workload; random is the only one so far")
    num_prompts: int | None = flag(None, "requests; default 1000, or all of a workload (else the first so many of it)")
    input_len: int | None = flag(None, "tokens in each random prompt; default 1024")
    output_len: int | None = flag(None, "tokens to generate for each random prompt; default 128")
    hf_mode: tuple[str, ...] = flag(HF_MODES, _HF_MODES_HELP)
    hf_batch_size: int = flag(64, "requests in a static batch of transformers")
    output_json: str | None = flag(None, "file to write everything measured to")
    save_detailed: bool = flag(False, "write every request's tokens and their times to that file too")
    profile: str | None = flag(None, _PROFILE_HELP)
    profile_steps: int = flag(32, _PROFILE_STEPS_HELP)

    def __post_init__(self) -> None:
        _check_shared(self)
        _check_positive(num_prompts=self.num_prompts, input_len=self.input_len, output_len=self.output_len)
        if self.dataset_name != "random":
            raise InputError(f"dataset_name={self.dataset_name!r} is not supported yet; leave it out or at 'random'")
        if self.workload:
            _refuse_beside_workload(input_len=self.input_len, output_len=self.output_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyArgs:
    """Flags of `bench latency`.

    Raises:
        InputError: a value out of range, or two that contradict each other.
    """

    engine: str = flag("jaxllm", _ENGINE_HELP)
    workload: tuple[str, ...] = flag((), _WORKLOAD_HELP)
    batch_size: int | None = flag(None, "requests in a batch; default 8")
    input_len: int | None = flag(None, "tokens in each prompt; default 32")
    output_len: int | None = flag(None, "tokens to generate for each prompt; default 128")
    num_iters: int = flag(30, "measured iterations, each with other prompts")
    num_iters_warmup: int = flag(10, "iterations before them, not measured")
    hf_mode: tuple[str, ...] = flag(HF_MODES, _HF_MODES_HELP)
    hf_batch_size: int = flag(64, "requests in a static batch of transformers")
    output_json: str | None = flag(None, "file to write everything measured to")
    save_detailed: bool = flag(False, "write every request's tokens and their times to that file too")
    profile: str | None = flag(None, _PROFILE_HELP)
    profile_steps: int = flag(32, _PROFILE_STEPS_HELP)

    def __post_init__(self) -> None:
        _check_shared(self)
        _check_positive(batch_size=self.batch_size, input_len=self.input_len, output_len=self.output_len)
        _check_positive(num_iters=self.num_iters, num_iters_warmup=self.num_iters_warmup)
        if self.workload:
            _refuse_beside_workload(batch_size=self.batch_size, input_len=self.input_len, output_len=self.output_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteArgs:
    """Flags of `bench suite`.

    Raises:
        InputError: a value out of range.
    """

    engine: str = flag("jaxllm", "jaxllm, or both: transformers too, on H1, which needs torch")
    models: tuple[str, ...] = flag(("llama-3.1-8b", "qwen3-0.6b"), "models to measure, several if you like")
    workload: tuple[str, ...] = flag((), "only these of L1, L8, W1, W2, W3 and H1; default: all but H1")
    num_seqs: int = flag(256, "--max-num-seqs of the engines")
    more_seqs: int = flag(512, "--max-num-seqs of further engines, which run W1 only; 0 for none")
    num_prompts: int | None = flag(None, "only the first so many requests of each workload")
    num_iters: int = flag(5, "measured iterations of L1 and L8, after one that is not; their median counts")
    seconds: float | None = flag(None, "ends after so long; what was measured by then is told and written")
    hf_mode: tuple[str, ...] = flag(HF_MODES, _HF_MODES_HELP)
    hf_batch_size: int = flag(64, "requests in a static batch of transformers")
    output_json: str | None = flag(None, "file to write everything measured to")

    def __post_init__(self) -> None:
        object.__setattr__(self, "models", workload_names(self.models))
        if self.engine not in ("jaxllm", "both"):
            raise InputError(f"engine={self.engine!r} is not known; choose jaxllm or both")
        if not self.models:
            raise InputError("models must name at least one")
        _check_workloads(self.workload, self.hf_mode)
        _check_positive(num_prompts=self.num_prompts, num_iters=self.num_iters, hf_batch_size=self.hf_batch_size)
        _check_positive(num_seqs=self.num_seqs, more_seqs=self.more_seqs)
        if self.seconds is not None and self.seconds <= 0:
            raise InputError(f"seconds={self.seconds:g} leaves no time: it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshArgs:
    """Flags of `bench mesh`.

    Raises:
        InputError: a value out of range, or a shape that is none.
    """

    shapes: str = flag("1x1,1x2,2x1,2x2", "shapes to run, as data x tensor: 1x8,2x4,4x2,8x1")
    num_prompts: int = flag(32, "requests, sent at once")
    input_len: int = flag(64, "tokens in each prompt")
    output_len: int = flag(32, "tokens to generate for each prompt")
    output_json: str | None = flag(None, "file to write everything measured to")

    def __post_init__(self) -> None:
        _check_positive(num_prompts=self.num_prompts, input_len=self.input_len, output_len=self.output_len)
        self.sizes()

    def sizes(self) -> list[tuple[int, int]]:
        """Gives the shapes as (data, tensor)."""
        shapes = [shape.strip() for shape in self.shapes.split(",")]
        for shape in shapes:
            data, x, tensor = shape.partition("x")
            if not (x and data.isdecimal() and tensor.isdecimal() and int(data) and int(tensor)):
                raise InputError(f"shapes={self.shapes!r}: {shape!r} is none; write data x tensor, as in 1x8,2x4,8x1")
        return [(int(data), int(tensor)) for data, tensor in (shape.split("x") for shape in shapes)]


def add_bench_flags(parser: OptionParser, args: type, title: str) -> None:
    """Adds a command's own flags and all of the engine's."""
    add_options(parser, args, title)
    add_options(parser, EngineArgs, "EngineConfig", grouped=True)
    add_hidden_options(parser, HIDDEN)


def bench_engine_args(options: dict[str, object]) -> EngineArgs:
    """Gives the engine's arguments as the comparison has them: no prefix caching, token ids in and out."""
    return engine_args({"enable_prefix_caching": False, "skip_tokenizer_init": True, **options})


def sorted_values[A](args: type[A], values: Mapping[str, Any]) -> tuple[A, dict[str, Any]]:
    """Parts a command's own flags from the engine's; the former are checked.

    Raises:
        InputError: see the command's dataclass.
    """
    own = {field.name for field in dataclasses.fields(args)}  # pyright: ignore[reportArgumentType]
    options = {name: value for name, value in values.items() if name not in own}
    return args(**{name: value for name, value in values.items() if name in own}), options


def workload_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Reads `L1 W1` and `L1,W1` alike."""
    return tuple(name for words in given for name in words.split(",") if name)


def _check_shared(args: ThroughputArgs | LatencyArgs) -> None:
    if args.engine not in ENGINES:
        raise InputError(f"engine={args.engine!r} is not known; choose one of {', '.join(ENGINES)}")
    _check_workloads(args.workload, args.hf_mode)
    _check_positive(hf_batch_size=args.hf_batch_size, profile_steps=args.profile_steps)
    if args.profile is not None and args.engine != "jaxllm":
        raise InputError(f"profile={args.profile!r} needs engine='jaxllm', got {args.engine!r}: its steps are traced")


def _check_workloads(workload: tuple[str, ...], hf_mode: tuple[str, ...]) -> None:
    for name in workload_names(workload):
        if name not in WORKLOAD_NAMES:
            raise InputError(f"workload={name!r} is not known; there are {', '.join(WORKLOAD_NAMES)}")
    for mode in hf_mode:
        if mode not in HF_MODES:
            raise InputError(f"hf_mode={mode!r} is not known; there are {', '.join(HF_MODES)}")


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        least = 0 if name in ("num_iters_warmup", "more_seqs") else 1
        if value is not None and value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")


def _refuse_beside_workload(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None:
            raise InputError(f"{name}={value} has no effect on a workload, whose requests are fixed: leave one out")
