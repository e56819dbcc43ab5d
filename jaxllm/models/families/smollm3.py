"""SmolLM3: Llama without rope on every fourth layer."""

from collections.abc import Mapping

from jaxllm.config.errors import InputError
from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import Family, decoder_pieces
from jaxllm.models.hf_config import FULL, SLIDING
from jaxllm.models.rope import no_rope


def configure(hf: Mapping) -> ModelConfig:
    """Reads SmolLM3's config.json."""
    hf = hf_config.Filled(
        hf,
        max_position_embeddings=32768,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        rope_theta=2e6,
        tie_word_embeddings=True,
    )
    rope = hf_rope.rope(hf, hf_config.head_dim(hf))
    bias = bool(hf.get("attention_bias"))
    return ModelConfig(
        **hf_config.shared_fields(hf),
        max_position=hf_rope.max_position(hf, rope),
        layer_kinds=layer_kinds(hf),
        ropes=(rope, no_rope(rope.dim)),
        norm_eps=hf["rms_norm_eps"],
        activation=hf_config.activation(hf),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(hf.get("mlp_bias")),
    )


def layer_kinds(hf: Mapping) -> tuple[LayerKind, ...]:
    """Which layers turn: listed, or all but every n-th; those that do not may have a window."""
    count, n = hf_config.num_layers(hf), hf.get("no_rope_layer_interval") or 4
    turned = hf.get("no_rope_layers") or [int((l + 1) % n != 0) for l in range(count)]
    if len(turned) < count:
        raise InputError(f"config.json: no_rope_layers must have an entry for each of {count} layers, got {turned}")
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    types = hf_config.layer_types(hf, [SLIDING if window and not turns else FULL for turns in turned[:count]])
    kinds = hf_config.window_kinds(types, window)
    return tuple(LayerKind(kind.window, 0 if turns else 1) for kind, turns in zip(kinds, turned, strict=False))


FAMILY = Family(configure, decoder_pieces)
