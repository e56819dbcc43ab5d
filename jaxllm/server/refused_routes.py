"""Routes that vLLM and SGLang have and this server has not yet: named in the answer. Knows paths only."""

_NOT_BUILT = frozenset(
    (
        *("/v1/responses", "/v1/messages", "/v1/embeddings", "/v2/embed", "/embed", "/v1/audio/transcriptions"),
        *("/v1/audio/translations", "/v1/realtime", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"),
        *("/classify", "/pooling", "/generative_scoring", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/reset_mm_cache", "/reset_encoder_cache", "/sleep", "/wake_up", "/is_sleeping", "/collective_rpc"),
        *("/get_world_size", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
        *("/finish_weight_update", "/generate", "/update_weights_from_disk", "/update_weights_from_tensor"),
        *("/update_weights_from_distributed", "/update_weights_from_ipc", "/init_weights_update_group"),
        *("/destroy_weights_update_group", "/release_memory_occupation", "/resume_memory_occupation"),
        *("/get_load", "/health_generate", "/freeze_gc", "/v1/files", "/v1/batches"),
    )
)


def missing_route(path: str) -> str:
    """Says that there is no such route, and of those that others have that it is not built yet."""
    if path in _NOT_BUILT:
        return f"{path} is not supported yet"
    if path == "/tokenizer_info":
        return f"{path} needs a server with --enable-tokenizer-info-endpoint"
    return f"there is no route {path}"
