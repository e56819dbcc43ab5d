"""What config.json says of each GGUF architecture beyond its sizes. Knows both vocabularies of keys; reads no file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_fields import GGUFFields
from jaxllm.models.checkpoint.gguf_rope import rope_scaling

HEAD_DIMS = {"gemma3": 256}  # where the metadata may leave it out, and it is not the width per head
# llama.cpp tells the two 27B models by their depth: they alone scale queries by the width per head, not by head_dim.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
# Files older than the key for the window are of these models, known by depth and context.
_PHI3_4K_LAYERS, _PHI3_4K_WINDOW = (32, 40), 2047


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a config says that GGUF leaves to the tensors. Factors are those of rope, one per frequency."""

    vocab_size: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    torch_dtype: str
    rope_factors: np.ndarray | None = None
    long_factors: np.ndarray | None = None
    short_factors: np.ndarray | None = None


def family_config(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    """Words what is particular to the architecture.

    Raises:
        InputError: a key is missing, or describes a model that the architecture's Hugging Face class is not.
    """
    return _FAMILIES[fields.architecture](fields, facts)


def may_turn_part_of_heads(architecture: str) -> bool:
    """Tells whether config.json of the architecture has a share of each head that rope turns."""
    return architecture == "phi3"


def _llama(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    if _window(fields, 0):
        return _mistral(fields, facts)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": facts.attention_bias,
        "mlp_bias": facts.mlp_bias,
        **_rope(fields, facts, 10000.0),
    }


def _mistral(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    if fields.optional_number("attention.temperature_scale"):
        raise InputError(
            f"{fields.path} is a Ministral 3, whose queries are scaled by position: that is not readable from GGUF"
        )
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "sliding_window": _window(fields, 0) or None,
        **_rope(fields, facts, 10000.0),
    }


def _qwen2(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    # Published files may name a window; none of them uses it.
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
        "sliding_window": None,
        **_rope(fields, facts, 10000.0),
    }


def _qwen3(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    return {
        **_qwen2(fields, facts),
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": facts.attention_bias,
    }


def _gemma2(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    window = _window(fields, 4096)
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": facts.attention_bias,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_query_scalar(fields),
        "sliding_window": window or None,
        "layer_types": _layer_types(fields, window, 2),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        **_rope(fields, facts, 10000.0),
    }


def _gemma3(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    window = _window(fields, 0)
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": facts.attention_bias,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_query_scalar(fields),
        "sliding_window": window or None,
        "layer_types": _layer_types(fields, window, 6),
        "rope_local_base_freq": fields.number("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": fields.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
        **_rope(fields, facts, 1_000_000.0),
    }


def _phi3(fields: GGUFFields, facts: TensorFacts) -> dict[str, Any]:
    context = fields.integer("context_length")
    is_old_4k = context == 4096 and fields.integer("block_count") in _PHI3_4K_LAYERS
    width_per_head = fields.integer("embedding_length") // fields.integer("attention.head_count")
    turned = fields.integer("rope.dimension_count", width_per_head)
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": _window(fields, _PHI3_4K_WINDOW if is_old_4k else 0) or None,
        "partial_rotary_factor": turned / fields.integer("attention.key_length", width_per_head),
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length", context),
        **_rope(fields, facts, 10000.0),
    }


def _rope(fields: GGUFFields, facts: TensorFacts, default_theta: float) -> dict[str, Any]:
    theta = fields.number("rope.freq_base", default_theta)
    if not 0.0 < theta < float("inf"):
        raise InputError(f"{fields.path}: the metadata key {fields.architecture}.rope.freq_base is {theta}")
    scaling = rope_scaling(fields, facts.rope_factors, theta, facts.long_factors, facts.short_factors)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _window(fields: GGUFFields, default: int) -> int:
    """Gives the sliding window; 0 is none."""
    window = fields.integer("attention.sliding_window", default)
    if window < 0:
        raise InputError(f"{fields.path}: the sliding window is {window}; convert the model again")
    return window


def _gemma_query_scalar(fields: GGUFFields) -> int:
    heads = fields.integer("attention.head_count")
    width_per_head = fields.integer("embedding_length") // heads
    if fields.integer("block_count") == _GEMMA_27B_LAYERS[fields.architecture]:
        return width_per_head
    return fields.integer("attention.key_length", HEAD_DIMS.get(fields.architecture, width_per_head))


def _layer_types(fields: GGUFFields, window: int, default_pattern: int) -> list[str]:
    """Gives one kind per layer. The pattern is a period, whose last layer is full, or a flag per layer."""
    num_layers = fields.integer("block_count")
    pattern = fields.metadata.get(f"{fields.architecture}.attention.sliding_window_pattern", default_pattern)
    if window == 0:
        sliding = [False] * num_layers
    elif isinstance(pattern, list) and len(pattern) == num_layers:
        sliding = [bool(flag) for flag in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        raise InputError(f"{fields.path}: the sliding window pattern {pattern} does not fit {num_layers} layers")
    return ["sliding_attention" if flag else "full_attention" for flag in sliding]


_FAMILIES: dict[str, Callable[[GGUFFields, TensorFacts], dict[str, Any]]] = {
    "llama": _llama,
    "mistral3": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
