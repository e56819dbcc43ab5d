"""Qwen 2 and 2.5: biases on queries, keys and values; a window on the upper layers of some."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, decoder_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads Qwen 2's config.json."""
    hf = hf_config.Filled(hf, max_position_embeddings=32768, rms_norm_eps=1e-6, hidden_act="silu")
    return ModelConfig(
        **hf_config.shared_fields(hf),
        **hf_rope.rope_fields(hf),
        layer_kinds=upper_layers_kinds(hf),
        norm_eps=hf["rms_norm_eps"],
        activation=hf_config.activation(hf),
        qkv_bias=True,
    )


def upper_layers_kinds(hf: Mapping) -> tuple[LayerKind, ...]:
    """With `use_sliding_window`, a window on the layers from `max_window_layers` on, or on those listed."""
    hf = hf_config.Filled(hf, sliding_window=4096, max_window_layers=28)
    count, lowest, window = hf_config.num_layers(hf), hf["max_window_layers"], hf["sliding_window"]
    upper = [hf_config.SLIDING if window and l >= lowest else hf_config.FULL for l in range(count)]
    types = hf_config.layer_types(hf, upper)
    return hf_config.window_kinds(types, window if hf.get("use_sliding_window") else None)


# Some files say what is so in any case.
FAMILY = Family(configure, decoder_pieces, harmless=frozenset({"attention_bias"}))
