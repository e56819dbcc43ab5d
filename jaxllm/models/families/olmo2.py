"""OLMo 2: norms behind attention and MLP and none before, and norms over all queries and all keys."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import LAYER, Family, Pieces, decoder_pieces, norm, qk_norm_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads OLMo 2's config.json."""
    hf = hf_config.Filled(hf, max_position_embeddings=2048, rms_norm_eps=1e-5, hidden_act="silu")
    bias = bool(hf.get("attention_bias"))
    return ModelConfig(
        **hf_config.shared_fields(hf),
        **hf_rope.rope_fields(hf),
        layer_kinds=(LayerKind(),) * hf_config.num_layers(hf),
        norm_eps=hf["rms_norm_eps"],
        pre_norms=False,
        post_norms=True,
        qk_norm="all_heads",
        activation=hf_config.activation(hf),
        qkv_bias=bias,
        o_bias=bias,
    )


def pieces(cfg: ModelConfig) -> Pieces:
    """Llama's names but for the norms."""
    return {
        **decoder_pieces(cfg),
        **qk_norm_pieces(cfg),
        **norm(cfg, "layers.post_attention_norm", LAYER + "post_attention_layernorm"),
        **norm(cfg, "layers.post_mlp_norm", LAYER + "post_feedforward_layernorm"),
    }


FAMILY = Family(configure, pieces)
