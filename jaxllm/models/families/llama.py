"""Llama 2 and 3.x, and the models that share their code (SmolLM2 and Falcon 3 among them)."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, decoder_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads Llama's config.json."""
    hf = hf_config.Filled(hf, max_position_embeddings=2048, rms_norm_eps=1e-6, hidden_act="silu")
    hf_config.refuse(hf, pretraining_tp=1, rope_interleaved=False)
    bias = bool(hf.get("attention_bias"))
    return ModelConfig(
        **hf_config.shared_fields(hf),
        **hf_rope.rope_fields(hf),
        layer_kinds=(LayerKind(),) * hf_config.num_layers(hf),
        norm_eps=hf["rms_norm_eps"],
        activation=hf_config.activation(hf),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )


FAMILY = Family(configure, decoder_pieces)
