"""The engine's flags, with vLLM's names: one table for the command line and for LLM's keyword arguments.

Knows names, types and ranges; what depends on the model or the device is resolved by the engine.
"""

import dataclasses
import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.config.errors import InputError
from jaxllm.config.flags_without_effect import FLAGS_WITHOUT_EFFECT, explain

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2"
DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
KV_CACHE_DTYPES = {  # bytes hold e4m3 numbers: see kernels/e4m3/reference.py
    **DTYPES,
    "fp8": "uint8",
    "fp8_e4m3": "uint8",
}
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")

# vLLM's flags whose feature is not built yet, with the value that asks for nothing. Any other value is refused.
NOT_BUILT: dict[str, object] = {
    "pipeline_parallel_size": 1,
    "enable_expert_parallel": False,
    "data_parallel_rank": None,
    "data_parallel_start_rank": None,
    "data_parallel_size_local": None,
    "data_parallel_address": None,
    "data_parallel_rpc_port": None,
    "data_parallel_backend": None,
    "data_parallel_hybrid_lb": False,
    "data_parallel_external_lb": False,
    "hf_config_path": None,
    "code_revision": None,
    "tokenizer_revision": None,
    "enable_return_routed_experts": False,
    "disable_sliding_window": False,
    "enable_prompt_embeds": False,
    "safetensors_load_strategy": None,
    "model_loader_extra_config": None,
    "ignore_patterns": (),
    "prefix_caching_hash_algo": None,
    "kv_offloading_size": None,
    "kv_offloading_backend": None,
    "kv_cache_metrics": False,
    "kv_cache_metrics_sample": None,
    "enable_layerwise_nvtx_tracing": False,
    "enable_logging_iteration_details": False,
    "max_num_partial_prefills": 1,
    "max_long_partial_prefills": 1,
    "scheduler_cls": None,
    "max_num_scheduled_tokens": None,
    "compilation_config": None,
    "cudagraph_capture_sizes": (),
    "max_cudagraph_capture_size": None,
    "optimization_level": None,
    "performance_mode": None,
    "kv_events_config": None,
    "weight_transfer_config": None,
    "additional_config": None,
    "calculate_kv_scales": False,
    "quantization": None,
    "enable_lora": False,
    "max_loras": None,
    "max_lora_rank": None,
    "max_cpu_loras": None,
    "lora_dtype": None,
    "fully_sharded_loras": False,
    "lora_modules": None,
    "speculative_config": None,
    "structured_outputs_config": None,
    "reasoning_parser": None,
    "tool_call_parser": None,
    "enable_auto_tool_choice": False,
    "cpu_offload_gb": 0,
    "kv_transfer_config": None,
    "enable_sleep_mode": False,
    "enable_mfu_metrics": False,
    "otlp_traces_endpoint": None,
    "stream_interval": 1,
    "async_scheduling": True,
    "enable_chunked_prefill": True,
}
# The flags that are no field: refused, or taken without effect. Each with a value of its type.
HIDDEN: dict[str, object] = {**NOT_BUILT, **{name: each.neutral for name, each in FLAGS_WITHOUT_EFFECT.items()}}


def flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """What a user may say about the engine. Sizes in tokens unless their name says bytes.

    Raises:
        InputError: a value out of range.
    """

    model: str = flag(DEFAULT_MODEL, "packaged name (smollm2, gemma3-270m), folder, .gguf file or hub id")
    tokenizer: str | None = flag(None, "folder or .gguf file with the tokenizer, if not the model's own")
    skip_tokenizer_init: bool = flag(False, "no tokenizer: token ids in, token ids out")
    chat_template: str | None = flag(None, "file with, text of, or the model's own name for, a jinja2 chat template")
    revision: str | None = flag(None, "branch, tag or commit of a hub id")
    download_dir: str | None = flag(None, "where hub downloads are kept")
    hf_token: str | None = flag(None, "token for gated hub models")
    hf_overrides: Mapping[str, Any] | None = flag(None, "JSON object merged into the model's config.json")
    generation_config: str = flag(
        "auto", "sampling defaults: auto (the model's generation_config.json), vllm (none), or a folder or file"
    )
    override_generation_config: Mapping[str, Any] | None = flag(None, "JSON object merged into the generation config")
    load_format: str = flag(
        "auto", "auto, safetensors, gguf, orbax (jaxllm convert), or dummy (random weights, real shapes)"
    )
    use_tqdm_on_load: bool = flag(True, "progress bar while loading")
    dtype: str = flag("auto", "auto, float32, bfloat16 or float16; auto is float32 on a CPU")
    seed: int = flag(0, "seeds the draw of seeds for requests that bring none")
    tensor_parallel_size: int = flag(1, "devices that share the weights of each layer and the KV heads")
    data_parallel_size: int = flag(1, "copies of the model, each with requests and a KV pool of its own")
    capture_collectives: bool = flag(False, "on several GPUs, record the collectives of a step in its graph too")
    disable_custom_all_reduce: bool = flag(False, "on several GPUs, leave small all-reduces to NCCL as well")
    nnodes: int = flag(1, "processes, usually one a host, that run the engine together")
    node_rank: int = flag(0, "which of them this is; 0 schedules and has the API")
    master_addr: str | None = flag(None, "name or address of the host of process 0, as the others reach it")
    master_port: int = flag(29501, "a free port of that host; the next one is used too")
    distributed_timeout_seconds: int | None = flag(None, "longest wait for the other processes at a start; default 300")
    max_model_len: int | None = flag(None, "longest prompt + output; default: the model's, or what the KV pool holds")
    block_size: int = flag(16, "tokens in a KV block")
    kv_cache_dtype: str = flag("auto", "auto (the model's dtype), fp8 or fp8_e4m3, bfloat16, float16 or float32")
    gpu_memory_utilization: float = flag(0.9, "share of the GPU's memory for weights, temporaries and KV pool")
    kv_cache_memory_bytes: int | None = flag(None, "size of the KV pool in bytes; overrides the share")
    num_gpu_blocks_override: int | None = flag(None, "size of the KV pool in blocks; overrides both")
    max_num_seqs: int | None = flag(None, "most requests running at once (per data rank); default 256, 32 on a CPU")
    max_num_batched_tokens: int | None = flag(None, "most tokens in a step (per data rank); default 8192, 512 on a CPU")
    scheduling_policy: str = flag("fcfs", "order of admission: fcfs, priority (lower first), or one of docs/tuning.md")
    enable_prefix_caching: bool = flag(True, "share the KV blocks of prompts that begin alike")
    long_prefill_token_threshold: int = flag(0, "most tokens of one request in a step; 0 sets no cap")
    max_prefill_tokens: int = flag(0, "most tokens in a step beyond one per request; 0 sets no cap")
    target_tpot_ms: float | None = flag(None, "most ms between two tokens of a request; prompts wait for it")
    max_logprobs: int = flag(20, "most logprobs that a request may ask for; -1 sets no limit")
    logprobs_mode: str = flag("raw_logprobs", f"what logprobs are: {', '.join(LOGPROBS_MODES)}")
    logits_processors: tuple[str, ...] = flag((), "functions compiled into the sampler, as module:attribute")
    attention_backend: str = flag("auto", "version of the paged attention kernel")
    enforce_eager: bool = flag(False, "compile each step shape at first use instead of before the first request")
    executables: str | None = flag(None, "folder of compiled programs, to load and to add to; see docs/startup.md")
    step_timeout: float = flag(300.0, "seconds after which a step that does not return is reported as hanging")
    disable_log_stats: bool = flag(False, "no periodic log line")

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype={self.dtype!r} is not known; choose one of {', '.join(DTYPES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise InputError(f"kv_cache_dtype={self.kv_cache_dtype!r} is not known; choose one of {known}")
        if self.load_format not in LOAD_FORMATS:
            raise InputError(f"load_format={self.load_format!r} is not known; choose one of {', '.join(LOAD_FORMATS)}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            known = ", ".join(LOGPROBS_MODES)
            raise InputError(f"logprobs_mode={self.logprobs_mode!r} is not known; choose one of {known}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise InputError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        for name in ("hf_overrides", "override_generation_config"):
            if not isinstance(getattr(self, name), dict | None):
                raise InputError(f"{name} must be a dictionary, got {getattr(self, name)!r:.80}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        self._check_processes()
        if self.block_size not in BLOCK_SIZES:
            raise InputError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size}")

    def _check_processes(self) -> None:
        if self.node_rank >= self.nnodes:
            raise InputError(f"node_rank={self.node_rank} is out of range: nnodes={self.nnodes} counts from 0")
        if self.nnodes > 1 and not self.master_addr:
            raise InputError(f"nnodes={self.nnodes} needs master_addr, the name or address of the host of process 0")
        if self.master_port > 65534:  # the next one is needed too
            raise InputError(f"master_port must be at most 65534, got {self.master_port}")


BLOCK_SIZES = (8, 16, 32, 64, 128)
_LEAST: dict[str, float] = {
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "master_port": 1,
    "distributed_timeout_seconds": 1,
    "max_model_len": 2,
    "kv_cache_memory_bytes": 1,
    "num_gpu_blocks_override": 2,  # block 0 is reserved
    "max_num_seqs": 1,
    "max_logprobs": -1,
    "max_num_batched_tokens": 1,
    "step_timeout": 0.001,
    "long_prefill_token_threshold": 0,
    "max_prefill_tokens": 0,
    "target_tpot_ms": 0.001,
}


def engine_args(options: Mapping[str, Any]) -> EngineArgs:
    """Builds EngineArgs from keyword arguments; those that mean nothing here are taken with a warning.

    Raises:
        InputError: an unknown name (the nearest known one is suggested), or one whose feature is not built yet.
    """
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    rest = {}
    for name, value in options.items():
        if name in known:
            rest[name] = None if name == "max_model_len" and value == "auto" else value
        elif name in NOT_BUILT:
            refuse_not_built(name, value)
        elif name in FLAGS_WITHOUT_EFFECT:
            logger.warning("%s", explain(name))
        else:
            near = difflib.get_close_matches(name, [*known, *HIDDEN], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"unknown option {name!r}{hint}")
    return EngineArgs(**rest)


def refuse_not_built(name: str, value: object) -> None:
    """Refuses a value that asks for a feature which does not exist yet."""
    if value != NOT_BUILT[name]:
        raise InputError(f"{name}={value!r} is not supported yet; leave it out or at {NOT_BUILT[name]!r}")
