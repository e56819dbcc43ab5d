"""Gemma 2: every second layer with a window, soft caps, norms on both sides, scaled and tied embeddings."""

from collections.abc import Mapping
from typing import Any

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import ModelConfig
from jaxllm.models.family import LAYER, Family, Pieces, decoder_pieces, norm


def configure(hf: Mapping) -> ModelConfig:
    """Reads Gemma 2's config.json."""
    hf_config.refuse(hf, use_bidirectional_attention=False)
    hf = hf_config.Filled(
        hf,
        max_position_embeddings=8192,
        head_dim=256,
        rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    )
    types = hf_config.layer_types(hf, hf_config.every_nth_full(hf_config.num_layers(hf), 2))
    return ModelConfig(
        **gemma_fields(hf),
        **hf_rope.rope_fields(hf),
        layer_kinds=hf_config.window_kinds(types, hf["sliding_window"]),
    )


def gemma_fields(hf: Mapping) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    bias = bool(hf.get("attention_bias"))
    return hf_config.shared_fields(
        hf,
        norm_eps=hf["rms_norm_eps"],
        norm_offset=1.0,
        post_norms=True,
        activation=hf_config.activation(hf, "hidden_activation"),
        attention_scale=float(hf_config.require(hf, "query_pre_attn_scalar")) ** -0.5,
        attention_softcap=hf["attn_logit_softcapping"],
        final_softcap=hf["final_logit_softcapping"],
        embed_scale=float(hf_config.require(hf, "hidden_size")) ** 0.5,
        qkv_bias=bias,
        o_bias=bias,
    )


def pieces(cfg: ModelConfig) -> Pieces:
    """Gemma has two norms more than Llama, and names the second norm differently."""
    return {
        **decoder_pieces(cfg),
        **norm(cfg, "layers.post_attention_norm", LAYER + "post_attention_layernorm"),
        **norm(cfg, "layers.mlp_norm", LAYER + "pre_feedforward_layernorm"),
        **norm(cfg, "layers.post_mlp_norm", LAYER + "post_feedforward_layernorm"),
    }


FAMILY = Family(configure, pieces, harmless=frozenset({"hidden_act"}))
