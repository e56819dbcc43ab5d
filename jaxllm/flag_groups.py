"""vLLM's groups of engine flags, by which `--help` is divided. Knows names; no defaults, no meaning."""

# Names that no dataclass has yet are listed too, so that a flag is in its group from the day it is built.
GROUPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ModelConfig": (
        "which model, in which type, of which length",
        (
            *("model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "dtype", "seed"),
            *("hf_config_path", "hf_overrides", "hf_token", "revision", "code_revision", "tokenizer_revision"),
            *("max_model_len", "quantization", "enforce_eager", "max_logprobs", "logprobs_mode", "logits_processors"),
            *("disable_sliding_window", "generation_config", "override_generation_config", "enable_sleep_mode"),
        ),
    ),
    "LoadConfig": (
        "how the weights are read",
        (
            *("load_format", "download_dir", "safetensors_load_strategy", "model_loader_extra_config"),
            *("ignore_patterns", "use_tqdm_on_load"),
        ),
    ),
    "AttentionConfig": ("the attention kernel", ("attention_backend",)),
    "ParallelConfig": (
        "how the model is spread over devices",
        (
            *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
            *("capture_collectives", "disable_custom_all_reduce"),
            *("nnodes", "node_rank", "master_addr", "master_port", "distributed_timeout_seconds"),
        ),
    ),
    "CacheConfig": (
        "the paged KV cache",
        (
            *("block_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype"),
            *("num_gpu_blocks_override", "enable_prefix_caching", "prefix_caching_hash_algo", "calculate_kv_scales"),
            *("kv_offloading_size", "kv_offloading_backend"),
        ),
    ),
    "LoRAConfig": (
        "adapters",
        ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_modules"),
    ),
    "ObservabilityConfig": (
        "logs, metrics and traces",
        ("disable_log_stats", "enable_mfu_metrics", "otlp_traces_endpoint", "profiler_config"),
    ),
    "SchedulerConfig": (
        "what goes into a step",
        (
            *("max_num_batched_tokens", "max_num_seqs", "max_prefill_tokens", "long_prefill_token_threshold"),
            *("target_tpot_ms", "scheduling_policy", "enable_chunked_prefill", "async_scheduling", "stream_interval"),
        ),
    ),
    "EngineConfig": (
        "the engine as a whole",
        ("executables", "step_timeout", "speculative_config", "kv_transfer_config"),
    ),
    "Frontend": ("the HTTP server and the chat template", ("chat_template",)),
}
_HOMES = {name: title for title, (_, names) in GROUPS.items() for name in names}


def group_of(name: str, otherwise: str) -> str:
    """Gives the group of a flag, by its field's name."""
    return _HOMES.get(name, otherwise)


def describe_group(title: str) -> str:
    """Says in a few words what a group is about; nothing for a title that is no group of vLLM's."""
    return GROUPS[title][0] if title in GROUPS else ""
