import json

import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.config import LayerKind, RopeConfig
from jaxllm.models.families.gemma3 import FAMILY, configure, layer_types

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture
def hf(golden):
    return json.loads((golden / "gemma3_text" / "config.json").read_text())


def test_the_golden_config_is_read(hf):
    cfg = configure(hf)
    assert (cfg.vocab_size, cfg.d_model, cfg.d_ff, cfg.num_layers) == (320, 48, 64, 6)
    assert (cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim) == (4, 1, 32)
    assert cfg.attention_scale == 24**-0.5
    assert cfg.embed_scale == 48**0.5
    sliding, full = LayerKind(16, 1), LayerKind(None, 0)
    assert cfg.layer_kinds == (sliding, sliding, full) * 2
    assert cfg.ropes == (RopeConfig(100_000.0, 32), RopeConfig(1000.0, 32))
    assert cfg.kv_layout.layers_per_group == 2
    assert cfg.kv_layout.windows == (16, 16, None)
    assert (cfg.tie_embeddings, cfg.qk_norm, cfg.post_norms, cfg.norm_offset) == (True, "head", True, 1.0)
    assert cfg.activation == "gelu_tanh"


def test_rope_parameters_by_kind_of_layer_give_the_same(hf):
    new = {key: value for key, value in hf.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {
        FULL: {"rope_type": "default", "rope_theta": 100_000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
    }
    assert configure(new) == configure(hf)


def test_scaling_stretches_the_rope_of_full_layers_only(hf):
    expected = RopeConfig(100_000.0, 32, (("factor", 8.0), ("rope_type", "linear"))), RopeConfig(1000.0, 32)
    assert configure(hf | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}).ropes == expected


def test_defaults_are_those_of_gemma_3():
    cfg = configure(
        {
            "architectures": ["Gemma3ForCausalLM"],
            "vocab_size": 8,
            "hidden_size": 64,
            "intermediate_size": 8,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "sliding_window": 512,
        }
    )
    assert (cfg.head_dim, cfg.attention_scale, cfg.tie_embeddings) == (256, 1 / 16, True)
    assert [kind.window for kind in cfg.layer_kinds] == [512] * 5 + [None, 512]
    assert [rope.theta for rope in cfg.ropes] == [1e6, 1e4]


def test_layer_kinds_are_listed_or_counted(hf):
    assert layer_types({"num_hidden_layers": 3, "sliding_window_pattern": 2}) == [SLIDING, FULL, SLIDING]
    assert layer_types({"num_hidden_layers": 2, "layer_types": [FULL, SLIDING]}) == [FULL, SLIDING]
    for listed in ([FULL], [FULL, "chunked_attention"]):
        with pytest.raises(InputError, match="layer_types must name 2 layers as sliding_attention or full_attention"):
            layer_types({"num_hidden_layers": 2, "layer_types": listed})


def test_every_norm_has_its_tensor(hf):
    names = {key: pieces[0].name for key, pieces in FAMILY.pieces(configure(hf)).items()}
    assert names["layers.attention_norm.scale"] == "model.layers.{l}.input_layernorm.weight"
    assert names["layers.post_attention_norm.scale"] == "model.layers.{l}.post_attention_layernorm.weight"
    assert names["layers.mlp_norm.scale"] == "model.layers.{l}.pre_feedforward_layernorm.weight"
    assert names["layers.post_mlp_norm.scale"] == "model.layers.{l}.post_feedforward_layernorm.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
        ({"sliding_window": None}, "lacks 'sliding_window', which Gemma3ForCausalLM needs"),
    ],
)
def test_what_is_not_built_or_missing_is_refused_in_one_line(hf, changes, message):
    with pytest.raises(InputError, match=message) as raised:
        configure(hf | changes)
    assert "\n" not in str(raised.value)
