"""Qwen 3, dense: a norm on each query and key head, and no biases unless asked for."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import ModelConfig
from jaxllm.models.families.qwen2 import upper_layers_kinds
from jaxllm.models.family import Family, Pieces, decoder_pieces, qk_norm_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads Qwen 3's config.json."""
    hf = hf_config.Filled(hf, max_position_embeddings=32768, rms_norm_eps=1e-6, hidden_act="silu", head_dim=128)
    bias = bool(hf.get("attention_bias"))
    return ModelConfig(
        **hf_config.shared_fields(hf),
        **hf_rope.rope_fields(hf),
        layer_kinds=upper_layers_kinds(hf),
        norm_eps=hf["rms_norm_eps"],
        qk_norm="head",
        activation=hf_config.activation(hf),
        qkv_bias=bias,
        o_bias=bias,
    )


def pieces(cfg: ModelConfig) -> Pieces:
    """Llama's names, and two norms more."""
    return decoder_pieces(cfg) | qk_norm_pieces(cfg)


FAMILY = Family(configure, pieces)
