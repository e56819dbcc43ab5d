"""GLM-4-0414 (Glm4ForCausalLM): GLM with norms behind attention and MLP as well as before."""

from collections.abc import Mapping

from jaxllm.models.config import ModelConfig
from jaxllm.models.families import glm
from jaxllm.models.family import LAYER, Family, Pieces, norm


def configure(hf: Mapping) -> ModelConfig:
    """Reads GLM-4's config.json."""
    return glm.configure(hf, post_norms=True)


def pieces(cfg: ModelConfig) -> Pieces:
    """GLM's names, and two norms more."""
    return {
        **glm.pieces(cfg),
        **norm(cfg, "layers.post_attention_norm", LAYER + "post_self_attn_layernorm"),
        **norm(cfg, "layers.post_mlp_norm", LAYER + "post_mlp_layernorm"),
    }


FAMILY = Family(configure, pieces)
