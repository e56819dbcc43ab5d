"""Llama 2 and 3.x, and the models that share their code (SmolLM2 among them)."""

from collections.abc import Mapping

from jaxllm.models import hf_config
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, decoder_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads Llama's config.json."""
    hf_config.refuse(hf, hidden_act="silu", attention_bias=False, mlp_bias=False, pretraining_tp=1)
    H = hf_config.head_dim(hf)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=hf_config.require(hf, "vocab_size"),
        d_model=hf_config.require(hf, "hidden_size"),
        d_ff=hf_config.require(hf, "intermediate_size"),
        num_q_heads=hf_config.require(hf, "num_attention_heads"),
        num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=H,
        max_position=hf.get("max_position_embeddings") or 2048,
        layer_kinds=(LayerKind(),) * hf_config.require(hf, "num_hidden_layers"),
        ropes=(hf_config.rope(hf, H, scaling=hf.get("rope_parameters") or hf.get("rope_scaling")),),
        norm_eps=hf.get("rms_norm_eps") or 1e-6,
        attention_scale=H**-0.5,
        tie_embeddings=bool(hf.get("tie_word_embeddings")),
        dtype=hf_config.dtype_name(hf),
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=hf_config.token_ids(hf.get("eos_token_id")),
    )


FAMILY = Family(configure, decoder_pieces)
