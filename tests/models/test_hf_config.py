import pytest

from jaxllm.config.errors import InputError
from jaxllm.models import hf_config
from jaxllm.models.config import LayerKind


def test_a_missing_field_names_itself_and_the_architecture():
    assert hf_config.require({"a": 0}, "a") == 0
    with pytest.raises(InputError, match="lacks 'hidden_size', which LlamaForCausalLM needs"):
        hf_config.require({"architectures": ["LlamaForCausalLM"], "hidden_size": None}, "hidden_size")
    with pytest.raises(InputError, match="lacks 'hidden_size', which this model needs"):
        hf_config.require({}, "hidden_size")


def test_a_field_that_changes_the_result_is_refused_unless_harmless():
    hf_config.refuse(
        {"mlp_bias": False, "attention_bias": None}, mlp_bias=False, attention_bias=False, hidden_act="silu"
    )
    with pytest.raises(InputError, match=r"mlp_bias=True is not supported for this architecture \(only False\)"):
        hf_config.refuse({"mlp_bias": True}, mlp_bias=False)


def test_the_head_size_is_given_or_derived():
    assert hf_config.head_dim({"head_dim": 128, "hidden_size": 64, "num_attention_heads": 4}) == 128
    assert hf_config.head_dim({"head_dim": None, "hidden_size": 64, "num_attention_heads": 4}) == 16
    with pytest.raises(InputError, match="lacks 'num_attention_heads'"):
        hf_config.head_dim({"hidden_size": 64})


def test_eos_ids_and_dtype_come_in_several_spellings():
    assert hf_config.token_ids(None) == ()
    assert hf_config.token_ids(2) == (2,)
    assert hf_config.token_ids([2, 5]) == (2, 5)
    assert hf_config.dtype_name({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert hf_config.dtype_name({"dtype": "float16"}) == "float16"
    assert hf_config.dtype_name({}) == "float32"


def test_activations_are_known_by_all_their_names():
    assert hf_config.activation({"hidden_act": "gelu_pytorch_tanh"}) == "gelu_tanh"
    assert hf_config.activation({"hidden_activation": "swish"}, "hidden_activation") == "silu"
    with pytest.raises(InputError, match="hidden_act='relu2' is not supported; supported are silu, "):
        hf_config.activation({"hidden_act": "relu2"})


def test_a_familys_defaults_fill_what_is_absent_and_leave_nulls():
    filled = hf_config.Filled({"a": None, "b": 2}, a=1, b=1, c=1)
    assert [filled["a"], filled["b"], filled["c"]] == [None, 2, 1]
    assert dict(filled) == {"a": None, "b": 2, "c": 1}
    assert len(filled) == 3
    assert filled.get("d") is None


def test_layers_are_listed_or_follow_the_familys_rule():
    assert hf_config.every_nth_full(4, 2) == ["sliding_attention", "full_attention"] * 2
    types = hf_config.layer_types({}, ["full_attention"])
    assert types == ["full_attention"]
    types = hf_config.layer_types({"layer_types": ["sliding_attention", "full_attention"]}, ["full_attention"] * 2)
    assert hf_config.window_kinds(types, 16) == (LayerKind(16), LayerKind(None))
