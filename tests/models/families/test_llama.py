import json

import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.config import LayerKind, RopeConfig
from jaxllm.models.families.llama import FAMILY, configure
from jaxllm.models.shapes import find_shape


@pytest.fixture
def hf(golden):
    return json.loads((golden / "llama" / "config.json").read_text())


def test_the_golden_config_is_read(hf):
    cfg = configure(hf)
    assert (cfg.vocab_size, cfg.d_model, cfg.d_ff, cfg.num_layers) == (320, 64, 96, 4)
    assert (cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim) == (4, 2, 16)
    assert cfg.attention_scale == 0.25
    assert cfg.layer_kinds == (LayerKind(None, 0),) * 4
    assert (cfg.tie_embeddings, cfg.qk_norm, cfg.post_norms, cfg.norm_offset) == (False, None, False, 0.0)
    assert cfg.ropes[0].theta == 10_000.0
    assert dict(cfg.ropes[0].scaling)["rope_type"] == "llama3"
    assert (cfg.bos_token_id, cfg.eos_token_ids, cfg.dtype) == (1, (2,), "float32")
    assert "head.proj" in FAMILY.pieces(cfg)


def test_a_tied_model_has_no_head_of_its_own(golden):
    cfg = configure(json.loads((golden / "llama_tied" / "config.json").read_text()))
    assert cfg.tie_embeddings
    assert cfg.ropes == (RopeConfig(10_000.0, 16),)
    assert "head.proj" not in FAMILY.pieces(cfg)


def test_rope_parameters_give_the_same_as_rope_theta_and_scaling(hf):
    new = dict(hf)
    new["rope_parameters"] = new.pop("rope_scaling") | {"rope_theta": new.pop("rope_theta")}
    assert configure(new) == configure(hf)


def test_old_configs_without_kv_heads_or_head_dim_have_one_kv_head_per_head(hf):
    del hf["num_key_value_heads"], hf["head_dim"]
    cfg = configure(hf)
    assert (cfg.num_kv_heads, cfg.head_dim) == (4, 16)


def test_biases_are_where_the_config_says(hf):
    cfg = configure(hf | {"attention_bias": True, "mlp_bias": True})
    assert (cfg.qkv_bias, cfg.o_bias, cfg.mlp_bias) == (True, True, True)
    named = {piece.name: piece.shape for pieces in FAMILY.pieces(cfg).values() for piece in pieces}
    attention, mlp = "model.layers.{l}.self_attn.", "model.layers.{l}.mlp."
    assert [named[f"{attention}{name}_proj.bias"] for name in "qkvo"] == [(64,), (32,), (32,), (64,)]
    assert [named[f"{mlp}{name}_proj.bias"] for name in ("gate", "up", "down")] == [(96,), (96,), (64,)]
    assert not any(
        name.endswith(".bias") for name in (p.name for ps in FAMILY.pieces(configure(hf)).values() for p in ps)
    )


def test_published_shapes_are_read():
    shape = find_shape("Llama-3.1-8B")
    assert shape is not None
    cfg = configure(shape)
    assert (cfg.num_layers, cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim, cfg.dtype) == (32, 32, 8, 128, "bfloat16")
    sizes = [piece.shape for pieces in FAMILY.pieces(cfg).values() for piece in pieces]
    assert (14336, 4096) in sizes
    assert find_shape("llama-3.1-9b") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu2"}, "hidden_act='relu2' is not supported"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 is not supported"),
        ({"num_hidden_layers": None}, "lacks 'num_hidden_layers', which LlamaForCausalLM needs"),
        ({"num_attention_heads": None}, "lacks 'num_attention_heads'"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3 KV heads"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "rope scaling 'mrope' is not supported"),
    ],
)
def test_what_is_not_built_or_missing_is_refused_in_one_line(hf, changes, message):
    with pytest.raises(InputError, match=message) as raised:
        configure(hf | changes)
    assert "\n" not in str(raised.value)
