"""Cohere's Command-R: LayerNorm without bias, attention beside the MLP, interleaved rope, scaled and tied logits."""

from collections.abc import Mapping
from typing import Any

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, Pieces, decoder_pieces, qk_norm_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads Command-R's config.json."""
    hf = hf_config.Filled(hf, max_position_embeddings=8192, rope_theta=5e5, use_qk_norm=False)
    kinds = (LayerKind(),) * hf_config.num_layers(hf)
    return command_config(hf, kinds, **hf_rope.rope_fields(hf), qk_norm="each_head" if hf["use_qk_norm"] else None)


def command_config(hf: Mapping, kinds: tuple[LayerKind, ...], **more: Any) -> ModelConfig:
    """What both generations of Command models share."""
    hf = hf_config.Filled(
        hf,
        layer_norm_eps=1e-5,
        hidden_act="silu",
        logit_scale=0.0625,
        tie_word_embeddings=True,
    )
    bias = bool(hf.get("attention_bias"))
    return ModelConfig(
        **hf_config.shared_fields(hf, **more),
        layer_kinds=kinds,
        rope_interleaved=True,
        norm="layer",
        norm_eps=hf["layer_norm_eps"],
        parallel_mlp=True,
        activation=hf_config.activation(hf),
        logit_scale=float(hf["logit_scale"]),
        qkv_bias=bias,
        o_bias=bias,
    )


def pieces(cfg: ModelConfig) -> Pieces:
    """Llama's names; Command-R+ has norms of each query and key head."""
    return decoder_pieces(cfg) | (qk_norm_pieces(cfg) if cfg.qk_norm else {})


FAMILY = Family(configure, pieces)
