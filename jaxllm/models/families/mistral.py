"""Mistral: Llama with a sliding window on every layer, or on none."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, decoder_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads Mistral's config.json."""
    hf_config.refuse(hf, attention_bias=False, mlp_bias=False)
    hf = hf_config.Filled(
        hf,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        sliding_window=4096,
    )
    return ModelConfig(
        **hf_config.shared_fields(hf),
        **hf_rope.rope_fields(hf),
        layer_kinds=(LayerKind(hf["sliding_window"]),) * hf_config.num_layers(hf),
        norm_eps=hf["rms_norm_eps"],
        activation=hf_config.activation(hf),
    )


FAMILY = Family(configure, decoder_pieces)
