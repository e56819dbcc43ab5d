"""Flags of vLLM that mean nothing here: taken, with one line that says why. Knows names and reasons."""

from typing import NamedTuple


class WithoutEffect(NamedTuple):
    """A value of the flag's type, and the reason why no value of it changes anything."""

    neutral: object
    why: str


_ONE_WAY = "there is one implementation of each model"
_NO_VISION = "no model here reads images, sound or video"
_ONE_CONTROLLER = "one process schedules for all devices, and jax talks to them"
_XLA = "XLA compiles the step and schedules its kernels"
_NO_POOLING = "models here generate, none pools"

FLAGS_WITHOUT_EFFECT: dict[str, WithoutEffect] = {
    # model
    "runner": WithoutEffect(None, _NO_POOLING),
    "convert": WithoutEffect(None, _NO_POOLING),
    "pooler_config": WithoutEffect(None, _NO_POOLING),
    "tokenizer_mode": WithoutEffect(None, "there is one tokenizer of each model"),
    "trust_remote_code": WithoutEffect(False, "code of a model's repository is never run"),
    "disable_cascade_attn": WithoutEffect(False, "there is no cascade attention"),
    "config_format": WithoutEffect(None, "the format of a model is seen in its files"),
    "model_impl": WithoutEffect(None, _ONE_WAY),
    "override_attention_dtype": WithoutEffect(None, "attention has the types of --dtype and --kv-cache-dtype"),
    "io_processor_plugin": WithoutEffect(None, "there are no such plugins"),
    "pt_load_map_location": WithoutEffect(None, "weights are never read with torch"),
    # media
    **{
        name: WithoutEffect(neutral, _NO_VISION)
        for name, neutral in {
            "allowed_local_media_path": None,
            "allowed_media_domains": (),
            "language_model_only": False,
            "limit_mm_per_prompt": None,
            "enable_mm_embeds": False,
            "media_io_kwargs": None,
            "mm_processor_kwargs": None,
            "mm_processor_cache_gb": None,
            "mm_processor_cache_type": None,
            "mm_shm_cache_max_object_size_mb": None,
            "mm_encoder_only": False,
            "mm_encoder_tp_mode": None,
            "mm_encoder_attn_backend": None,
            "interleave_mm_strings": False,
            "skip_mm_profiling": False,
            "video_pruning_rate": None,
            "default_mm_loras": None,
            "enable_tower_connector_lora": False,
            "disable_chunked_mm_input": False,
            "ec_transfer_config": None,
        }.items()
    },
    # devices
    "distributed_executor_backend": WithoutEffect(None, _ONE_CONTROLLER),
    "max_parallel_loading_workers": WithoutEffect(None, _ONE_CONTROLLER),
    "ray_workers_use_nsight": WithoutEffect(False, _ONE_CONTROLLER),
    "worker_cls": WithoutEffect(None, _ONE_CONTROLLER),
    "worker_extension_cls": WithoutEffect(None, _ONE_CONTROLLER),
    "disable_nccl_for_dp_synchronization": WithoutEffect(False, _ONE_CONTROLLER),
    "prefill_context_parallel_size": WithoutEffect(None, "contexts are not split over devices"),
    "decode_context_parallel_size": WithoutEffect(None, "contexts are not split over devices"),
    "dcp_comm_backend": WithoutEffect(None, "contexts are not split over devices"),
    "dcp_kv_cache_interleave_size": WithoutEffect(None, "contexts are not split over devices"),
    "cp_kv_cache_interleave_size": WithoutEffect(None, "contexts are not split over devices"),
    "all2all_backend": WithoutEffect(None, "experts are not split over devices"),
    "enable_elastic_ep": WithoutEffect(False, "experts are not split over devices"),
    "enable_eplb": WithoutEffect(False, "experts are not split over devices"),
    "eplb_config": WithoutEffect(None, "experts are not split over devices"),
    "expert_placement_strategy": WithoutEffect(None, "experts are not split over devices"),
    "enable_dbo": WithoutEffect(False, _XLA),
    "ubatch_size": WithoutEffect(None, _XLA),
    "dbo_decode_token_threshold": WithoutEffect(None, _XLA),
    "dbo_prefill_token_threshold": WithoutEffect(None, _XLA),
    # cache and weights
    "kv_sharing_fast_prefill": WithoutEffect(False, "no model here shares KV between layers"),
    "mamba_cache_dtype": WithoutEffect(None, "no model here has Mamba layers"),
    "mamba_ssm_cache_dtype": WithoutEffect(None, "no model here has Mamba layers"),
    "mamba_block_size": WithoutEffect(None, "no model here has Mamba layers"),
    "mamba_cache_mode": WithoutEffect(None, "no model here has Mamba layers"),
    "offload_backend": WithoutEffect(None, "weights stay on the device"),
    "cpu_offload_params": WithoutEffect((), "weights stay on the device"),
    "offload_group_size": WithoutEffect(None, "weights stay on the device"),
    "offload_num_in_group": WithoutEffect(None, "weights stay on the device"),
    "offload_prefetch_step": WithoutEffect(None, "weights stay on the device"),
    "offload_params": WithoutEffect((), "weights stay on the device"),
    "disable_hybrid_kv_cache_manager": WithoutEffect(False, "layers of one kind always share a KV group"),
    "specialize_active_lora": WithoutEffect(False, "adapters are not built yet"),
    # compilation
    "enable_flashinfer_autotune": WithoutEffect(False, "there are no FlashInfer kernels"),
    "moe_backend": WithoutEffect(None, _XLA),
    "kernel_config": WithoutEffect(None, "kernels are chosen at start; see --attention-backend"),
    "attention_config": WithoutEffect(None, "kernels are chosen at start; see --attention-backend"),
    # logs
    "collect_detailed_traces": WithoutEffect(None, "there are no such traces; see --profiler-config"),
    "cudagraph_metrics": WithoutEffect(False, "XLA keeps the graphs"),
    "show_hidden_metrics_for_version": WithoutEffect(None, "no metric is hidden"),
    "aggregate_engine_logging": WithoutEffect(False, "one process logs for all data ranks"),
    "fail_on_environ_validation": WithoutEffect(False, "no VLLM_ variable but VLLM_API_KEY is read"),
    # server
    "reasoning_parser_plugin": WithoutEffect(None, "there are no such plugins"),
    "tool_parser_plugin": WithoutEffect(None, "there are no such plugins"),
    "enable_server_load_tracking": WithoutEffect(False, "the load is always told at /load"),
    "h11_max_header_count": WithoutEffect(None, "headers are limited by --h11-max-incomplete-event-size"),
    "enable_offline_docs": WithoutEffect(False, "the pages of /docs come from FastAPI's own addresses"),
}


def explain(name: str) -> str:
    """Says in one line that a flag has no effect, and why."""
    return f"{name} has no effect: {FLAGS_WITHOUT_EFFECT[name].why}"
