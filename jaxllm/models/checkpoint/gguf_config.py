"""Words GGUF metadata as a Hugging Face config. Knows the sizes and ids that all architectures have; reads no file."""

from typing import Any

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_families import HEAD_DIMS, TensorFacts, family_config, may_turn_part_of_heads
from jaxllm.models.checkpoint.gguf_fields import GGUFFields

# Far more than any published model has: damaged metadata must not ask for a list of billions.
_MAX_LAYERS = 1024
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def hf_config(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    """Builds config.json's content.

    Raises:
        InputError: a key is missing, or describes a model that the architecture's Hugging Face class is not.
    """
    if fields.integer("expert_count", 0):
        raise InputError(f"{fields.path} has {fields.integer('expert_count')} experts: GGUF mixtures are not readable")
    config = {
        **_shape(fields, facts),
        **family_config(fields, facts),
        "bos_token_id": fields.optional_integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.optional_integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.optional_integer("tokenizer.ggml.padding_token_id"),
    }
    _check_rope(fields, facts, config["head_dim"])
    return config


def hf_generation_config(fields: GGUFFields) -> dict[str, Any]:
    """Builds generation_config.json's content: any of several tokens may end a turn.

    Raises:
        InputError: a key has a value of another type.
    """
    ends = [fields.optional_integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    generation: dict[str, Any] = {
        "bos_token_id": fields.optional_integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": fields.optional_integer("tokenizer.ggml.padding_token_id"),
    }
    for key, name in _SAMPLING_KEYS.items():
        generation[name] = fields.optional_integer(key) if name == "top_k" else fields.optional_number(key)
    return {key: value for key, value in generation.items() if value is not None}


def _shape(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    width = _size(fields, "embedding_length")
    heads = _size(fields, "attention.head_count", highest=width)
    head_dim = _size(fields, "attention.key_length", default=HEAD_DIMS.get(fields.architecture, width // heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise InputError(f"{fields.path}: keys and values of different lengths per head are not readable from GGUF")
    return {
        "vocab_size": facts.vocab_size,
        "hidden_size": width,
        "intermediate_size": _size(fields, "feed_forward_length"),
        "num_hidden_layers": _size(fields, "block_count", highest=_MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": _size(fields, "attention.head_count_kv", default=heads, highest=heads),
        "head_dim": head_dim,
        "max_position_embeddings": _size(fields, "context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": facts.tied,
        "torch_dtype": facts.torch_dtype,
    }


def _size(fields: GGUFFields, key: str, default: int | None = None, highest: int = 2**31 - 1) -> int:
    value = fields.integer(key, default)
    if not 1 <= value <= highest:
        raise InputError(
            f"{fields.path}: {fields.architecture}.{key} is {value}, which is not from 1 to {highest}; "
            f"convert the model again"
        )
    return value


def _check_rope(fields: GGUFFields, facts: TensorFacts, head_dim: int) -> None:
    turned = fields.integer("rope.dimension_count", head_dim)
    if not 0 < turned <= head_dim or (turned < head_dim and not may_turn_part_of_heads(fields.architecture)):
        raise InputError(
            f"{fields.path} rotates {turned} of {head_dim} values per head: "
            f"partial rope is not readable from GGUF of architecture {fields.architecture}, use the safetensors files"
        )
    for factors in (facts.rope_factors, facts.long_factors, facts.short_factors):
        if factors is not None and len(factors) != turned // 2:
            raise InputError(f"{fields.path} has {len(factors)} rope factors for heads of {turned}: one per two values")
