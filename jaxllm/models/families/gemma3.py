"""Gemma 3, text only: alternating windows with two ropes, qk-norm, norms on both sides, scaled embeddings."""

from collections.abc import Mapping

from jaxllm.config.errors import InputError
from jaxllm.models import hf_config
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, Piece, decoder_pieces, norm

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def configure(hf: Mapping) -> ModelConfig:
    """Reads Gemma 3's config.json (of the text model)."""
    hf_config.refuse(hf, attention_bias=False, use_bidirectional_attention=False)
    activation = hf.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation not in _ACTIVATIONS:
        raise InputError(f"config.json: hidden_activation={activation!r} is not supported for Gemma 3")
    H = int(hf.get("head_dim") or 256)
    D = hf_config.require(hf, "hidden_size")
    both = hf.get("rope_parameters") or {}
    scaling = both.get(_FULL) if _FULL in both else hf.get("rope_scaling")
    window = hf_config.require(hf, "sliding_window")
    return ModelConfig(
        architecture="Gemma3ForCausalLM",
        vocab_size=hf_config.require(hf, "vocab_size"),
        d_model=D,
        d_ff=hf_config.require(hf, "intermediate_size"),
        num_q_heads=hf_config.require(hf, "num_attention_heads"),
        num_kv_heads=hf_config.require(hf, "num_key_value_heads"),
        head_dim=H,
        max_position=hf.get("max_position_embeddings") or 131072,
        layer_kinds=tuple(LayerKind(window, 1) if kind == _SLIDING else LayerKind(None, 0) for kind in layer_types(hf)),
        ropes=(
            hf_config.rope({"rope_theta": 1e6} | dict(hf), H, scaling=scaling),
            hf_config.rope(
                {"rope_local_base_freq": 1e4} | dict(hf),
                H,
                theta_key="rope_local_base_freq",
                scaling=both.get(_SLIDING),
            ),
        ),
        norm_eps=hf.get("rms_norm_eps") or 1e-6,
        norm_offset=1.0,
        activation=_ACTIVATIONS[activation],
        attention_scale=float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
        attention_softcap=hf.get("attn_logit_softcapping"),
        final_softcap=hf.get("final_logit_softcapping"),
        embed_scale=float(D) ** 0.5,
        qk_norm=True,
        post_norms=True,
        tie_embeddings=hf.get("tie_word_embeddings") is not False,
        dtype=hf_config.dtype_name(hf),
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=hf_config.token_ids(hf.get("eos_token_id")),
    )


def layer_types(hf: Mapping) -> list[str]:
    """The kind of each layer: listed, or every n-th one full."""
    count = hf_config.require(hf, "num_hidden_layers")
    listed = hf.get("layer_types")
    if listed:
        if len(listed) != count or set(listed) - {_SLIDING, _FULL}:
            raise InputError(
                f"config.json: layer_types must name {count} layers as {_SLIDING} or {_FULL}, got {listed}"
            )
        return list(listed)
    pattern = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    return [_SLIDING if (l + 1) % pattern else _FULL for l in range(count)]


def pieces(cfg: ModelConfig) -> dict[str, tuple[Piece, ...]]:
    """Gemma 3 adds four norms and names Llama's second norm differently."""
    D, H, layer = cfg.d_model, cfg.head_dim, "model.layers.{l}."
    return decoder_pieces(cfg) | {
        "layers.attention.q_norm": (norm(layer + "self_attn.q_norm", H),),
        "layers.attention.k_norm": (norm(layer + "self_attn.k_norm", H),),
        "layers.post_attention_norm": (norm(layer + "post_attention_layernorm", D),),
        "layers.mlp_norm": (norm(layer + "pre_feedforward_layernorm", D),),
        "layers.post_mlp_norm": (norm(layer + "post_feedforward_layernorm", D),),
    }


FAMILY = Family(configure, pieces)
