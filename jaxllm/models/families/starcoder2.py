"""StarCoder2: LayerNorm, biases everywhere, an MLP without a gate, a window on every layer."""

from collections.abc import Mapping

from jaxllm.models import hf_config, hf_rope
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.family import MLP, Family, Pieces, decoder_pieces, linear_pieces


def configure(hf: Mapping) -> ModelConfig:
    """Reads StarCoder2's config.json."""
    hf_config.refuse(hf, norm_type="layer_norm", mlp_type="default")
    hf = hf_config.Filled(
        hf,
        max_position_embeddings=4096,
        num_key_value_heads=2,
        norm_epsilon=1e-5,
        hidden_act="gelu_pytorch_tanh",
        use_bias=True,
        tie_word_embeddings=True,
    )
    bias = bool(hf["use_bias"])
    return ModelConfig(
        **hf_config.shared_fields(hf),
        **hf_rope.rope_fields(hf),
        layer_kinds=(LayerKind(hf.get("sliding_window")),) * hf_config.num_layers(hf),
        norm="layer",
        norm_bias=True,
        norm_eps=hf["norm_epsilon"],
        gated_mlp=False,
        activation=hf_config.activation(hf),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def pieces(cfg: ModelConfig) -> Pieces:
    """Llama's names but for the MLP's."""
    return {
        **decoder_pieces(cfg),
        **linear_pieces(cfg.mlp_bias, "layers.mlp.up", MLP + "c_fc", cfg.d_ff, cfg.d_model),
        **linear_pieces(cfg.mlp_bias, "layers.mlp.down", MLP + "c_proj", cfg.d_model, cfg.d_ff),
    }


FAMILY = Family(configure, pieces)
