"""GLM-4-9B as GlmForCausalLM: half of each head turned, interleaved; biases on q, k, v; gate and up in one tensor."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, Pieces, decoder_pieces, gate_up_pieces


def configure(hf: Mapping, post_norms: bool = False) -> ModelConfig:
    """Reads GLM's config.json."""
    hf = hf_config.Filled(
        hf,
        max_position_embeddings=131072,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        hidden_act="silu",
        attention_bias=True,
        eos_token_id=[151329, 151336, 151338],
    )
    return ModelConfig(
        **hf_config.shared_fields(hf),
        **hf_rope.rope_fields(hf, partial=0.5),
        layer_kinds=(LayerKind(),) * hf_config.num_layers(hf),
        rope_interleaved=True,
        norm_eps=hf["rms_norm_eps"],
        post_norms=post_norms,
        activation=hf_config.activation(hf),
        qkv_bias=bool(hf["attention_bias"]),
    )


def pieces(cfg: ModelConfig) -> Pieces:
    """Llama's names, with gate and up in one tensor."""
    return decoder_pieces(cfg) | gate_up_pieces(cfg, fused="gate_up_proj")


FAMILY = Family(configure, pieces)
