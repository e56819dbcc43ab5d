"""Phi 3, 3.5 and 4, and Phi 4 mini: fused projections, a window on every layer, part of each head turned, longrope."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, Pieces, decoder_pieces, gate_up_pieces, qkv_pieces

_LONGROPE_ONCE = ("su", "yarn")  # what the first files called it


def configure(hf: Mapping) -> ModelConfig:
    """Reads Phi 3's config.json."""
    hf_config.refuse(hf, attention_bias=False, mlp_bias=False, lm_head_bias=False)
    hf = hf_config.Filled(
        hf,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        hidden_act="silu",
    )
    scaling = hf_rope.rope_parameters(hf)
    if (scaling.get("rope_type") or scaling.get("type")) in _LONGROPE_ONCE:
        scaling["rope_type"] = "longrope"
    return ModelConfig(
        **hf_config.shared_fields(hf),
        layer_kinds=(LayerKind(hf.get("sliding_window")),) * hf_config.num_layers(hf),
        max_position=hf_config.require(hf, "max_position_embeddings"),
        ropes=(hf_rope.rope(hf, hf_config.head_dim(hf), scaling=scaling, partial=1.0),),
        norm_eps=hf["rms_norm_eps"],
        activation=hf_config.activation(hf),
    )


def pieces(cfg: ModelConfig) -> Pieces:
    """One tensor holds q, k and v, another gate and up."""
    return decoder_pieces(cfg) | qkv_pieces(cfg, fused="qkv_proj") | gate_up_pieces(cfg, fused="gate_up_proj")


# Read only where the rope is scaled.
FAMILY = Family(configure, pieces, harmless=frozenset({"original_max_position_embeddings"}))
