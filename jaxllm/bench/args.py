"""The flags of `jaxllm bench`, with vLLM's names where it has them. Knows names, types and ranges: measures nothing."""

from dataclasses import dataclass

from jaxllm.config.engine_args import NOT_BUILT, EngineArgs, engine_args, flag
from jaxllm.config.errors import InputError
from jaxllm.options import OptionParser, add_hidden_options, add_options

ENGINES = ("jaxllm", "hf", "both")
HF_MODES = ("static", "continuous")
WORKLOAD_NAMES = ("L1", "L8", "W1", "W2", "W3", "H1")

_ENGINE_HELP = "what to measure: jaxllm, hf (transformers, which needs torch), or both, one after the other"
_WORKLOAD_HELP = f"workloads of the comparison, several if you like: {', '.join(WORKLOAD_NAMES)}"
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

    def __post_init__(self) -> None:
        _check_shared(self.engine, self.workload, self.hf_mode, self.hf_batch_size)
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

    def __post_init__(self) -> None:
        _check_shared(self.engine, self.workload, self.hf_mode, self.hf_batch_size)
        _check_positive(batch_size=self.batch_size, input_len=self.input_len, output_len=self.output_len)
        _check_positive(num_iters=self.num_iters, num_iters_warmup=self.num_iters_warmup)
        if self.workload:
            _refuse_beside_workload(batch_size=self.batch_size, input_len=self.input_len, output_len=self.output_len)


def add_bench_flags(parser: OptionParser, args: type, title: str) -> None:
    """Adds a command's own flags and all of the engine's."""
    add_options(parser, args, title)
    add_options(parser, EngineArgs, "EngineConfig", grouped=True)
    add_hidden_options(parser, NOT_BUILT)


def bench_engine_args(options: dict[str, object]) -> EngineArgs:
    """Gives the engine's arguments as the comparison has them: no prefix caching, token ids in and out."""
    return engine_args({"enable_prefix_caching": False, "skip_tokenizer_init": True, **options})


def workload_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """Reads `L1 W1` and `L1,W1` alike."""
    return tuple(name for words in given for name in words.split(",") if name)


def _check_shared(engine: str, workload: tuple[str, ...], hf_mode: tuple[str, ...], hf_batch_size: int) -> None:
    if engine not in ENGINES:
        raise InputError(f"engine={engine!r} is not known; choose one of {', '.join(ENGINES)}")
    for name in workload_names(workload):
        if name not in WORKLOAD_NAMES:
            raise InputError(f"workload={name!r} is not known; there are {', '.join(WORKLOAD_NAMES)}")
    for mode in hf_mode:
        if mode not in HF_MODES:
            raise InputError(f"hf_mode={mode!r} is not known; there are {', '.join(HF_MODES)}")
    _check_positive(hf_batch_size=hf_batch_size)


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        least = 0 if name == "num_iters_warmup" else 1
        if value is not None and value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")


def _refuse_beside_workload(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None:
            raise InputError(f"{name}={value} has no effect on a workload, whose requests are fixed: leave one out")
