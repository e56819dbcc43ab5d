"""Gemma 3, text only: Gemma 2 with another pattern of windows, two ropes and qk-norm."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.families.gemma2 import gemma_fields
from jaxllm.models.families.gemma2 import pieces as gemma2_pieces
from jaxllm.models.family import Family, Pieces, qk_norm_pieces
from jaxllm.models.hf_config import FULL, SLIDING


def configure(hf: Mapping) -> ModelConfig:
    """Reads Gemma 3's config.json (of the text model)."""
    hf_config.refuse(hf, use_bidirectional_attention=False)
    hf = hf_config.Filled(
        hf,
        max_position_embeddings=131072,
        head_dim=256,
        rms_norm_eps=1e-6,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=256,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=True,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
    )
    window, H = hf_config.require(hf, "sliding_window"), hf_config.head_dim(hf)
    both = hf.get("rope_parameters") or {}
    of_full = hf_rope.rope(hf, H, scaling=hf.get("rope_scaling") or both.get(FULL) or {})
    of_sliding = hf_rope.rope(hf, H, theta_key="rope_local_base_freq", scaling=both.get(SLIDING) or {})
    return ModelConfig(
        **gemma_fields(hf),
        max_position=hf_rope.max_position(hf, of_full),
        layer_kinds=tuple(LayerKind(window, 1) if kind == SLIDING else LayerKind(None, 0) for kind in layer_types(hf)),
        ropes=(of_full, of_sliding),
        qk_norm="head",
    )


def layer_types(hf: Mapping) -> list[str]:
    """The kind of each layer: listed, or every n-th one full."""
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    return hf_config.layer_types(hf, hf_config.every_nth_full(hf_config.num_layers(hf), pattern))


def pieces(cfg: ModelConfig) -> Pieces:
    """Gemma 2's names, and the norms of queries and keys."""
    return gemma2_pieces(cfg) | qk_norm_pieces(cfg)


FAMILY = Family(configure, pieces, harmless=frozenset({"hidden_act"}))
