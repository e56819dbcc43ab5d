"""Granite 3: Llama with multipliers of embeddings, scores, sub-layers and logits."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, decoder_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads Granite's config.json."""
    hf = hf_config.Filled(
        hf,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        embedding_multiplier=1.0,
        attention_multiplier=1.0,
        residual_multiplier=1.0,
        logits_scaling=1.0,
    )
    bias = bool(hf.get("attention_bias"))
    return ModelConfig(
        **hf_config.shared_fields(hf, attention_scale=float(hf_config.require(hf, "attention_multiplier"))),
        **hf_rope.rope_fields(hf),
        layer_kinds=(LayerKind(),) * hf_config.num_layers(hf),
        norm_eps=hf["rms_norm_eps"],
        activation=hf_config.activation(hf),
        embed_scale=float(hf["embedding_multiplier"]),
        residual_scale=float(hf["residual_multiplier"]),
        logit_scale=1.0 / float(hf["logits_scaling"]),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )


FAMILY = Family(configure, decoder_pieces)
