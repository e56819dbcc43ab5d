"""Words GGUF metadata as a Hugging Face config. Knows the config keys of each architecture; reads no file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_fields import GGUFFields
from jaxllm.models.checkpoint.gguf_rope import rope_scaling

# llama.cpp tells Gemma 3 27B by its depth: it alone scales queries by the width per head, not by head_dim.
_GEMMA3_27B_LAYERS = 62
_HEAD_DIMS = {"gemma3": 256}  # where the metadata may leave it out, and it is not the width per head
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a config says that GGUF leaves to the tensors."""

    vocab_size: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    torch_dtype: str
    rope_factors: np.ndarray | None


def hf_config(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    """Builds config.json's content.

    Raises:
        InputError: a key is missing, or describes a model that the architecture's Hugging Face class is not.
    """
    if fields.integer("expert_count", 0):
        raise InputError(f"{fields.path} has {fields.integer('expert_count')} experts: GGUF mixtures are not readable")
    config = {
        **_shape(fields, facts),
        **_WORDERS[fields.architecture](fields, facts),
        "bos_token_id": fields.optional_integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.optional_integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.optional_integer("tokenizer.ggml.padding_token_id"),
    }
    rotated = fields.integer("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise InputError(
            f"{fields.path} rotates {rotated} of {config['head_dim']} values per head: "
            f"partial rope is not readable from GGUF, use the safetensors files"
        )
    if facts.rope_factors is not None and len(facts.rope_factors) != rotated // 2:
        raise InputError(
            f"{fields.path} has {len(facts.rope_factors)} rope factors for heads of {rotated}: one per two values"
        )
    return config


def hf_generation_config(fields: GGUFFields) -> dict[str, Any]:
    """Builds generation_config.json's content: any of several tokens may end a turn."""
    ends = [fields.optional_integer(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    generation: dict[str, Any] = {
        "bos_token_id": fields.optional_integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": fields.optional_integer("tokenizer.ggml.padding_token_id"),
    }
    generation |= {name: fields.find(key) for key, name in _SAMPLING_KEYS.items()}
    return {key: value for key, value in generation.items() if value is not None}


def _shape(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    width, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if heads < 1:
        raise InputError(
            f"{fields.path}: {fields.architecture}.attention.head_count is {heads}; convert the model again"
        )
    head_dim = fields.integer("attention.key_length", _HEAD_DIMS.get(fields.architecture, width // heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise InputError(f"{fields.path}: keys and values of different lengths per head are not readable from GGUF")
    return {
        "vocab_size": facts.vocab_size,
        "hidden_size": width,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": facts.attention_bias,
        "tie_word_embeddings": facts.tied,
        "torch_dtype": facts.torch_dtype,
    }


def _llama(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    theta = fields.number("rope.freq_base", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": facts.mlp_bias,
        "rope_theta": theta,
        "rope_scaling": rope_scaling(fields, facts.rope_factors, theta),
    }


def _gemma3(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    num_layers, heads = fields.integer("block_count"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", _HEAD_DIMS["gemma3"])
    window = fields.integer("attention.sliding_window", 0)
    theta = fields.number("rope.freq_base", 1_000_000.0)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            fields.integer("embedding_length") // heads if num_layers == _GEMMA3_27B_LAYERS else head_dim
        ),
        "sliding_window": window or None,
        "layer_types": _gemma3_layer_types(fields, num_layers, window),
        "rope_theta": theta,
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        "rope_scaling": rope_scaling(fields, facts.rope_factors, theta),
        "attn_logit_softcapping": fields.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


def _gemma3_layer_types(fields: GGUFFields, num_layers: int, window: int) -> list[str]:
    """Gives one kind per layer. The pattern is a period, whose last layer is full, or a flag per layer."""
    pattern = fields.metadata.get(f"{fields.architecture}.attention.sliding_window_pattern", 6)
    if window == 0:
        sliding = [False] * num_layers
    elif isinstance(pattern, list) and len(pattern) == num_layers:
        sliding = [bool(flag) for flag in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        raise InputError(f"{fields.path}: the sliding window pattern {pattern} does not fit {num_layers} layers")
    return ["sliding_attention" if flag else "full_attention" for flag in sliding]


_WORDERS: dict[str, Callable[[GGUFFields, TensorFacts], dict[str, Any]]] = {"llama": _llama, "gemma3": _gemma3}
