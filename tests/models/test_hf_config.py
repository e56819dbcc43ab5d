import pytest

from jaxllm.config.errors import InputError
from jaxllm.models import hf_config
from jaxllm.models.config import RopeConfig

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


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


def test_both_spellings_of_rope_give_the_same():
    old = hf_config.rope({"rope_theta": 5e5}, 16, scaling={"type": "llama3", **LLAMA3})
    new = hf_config.rope({}, 16, scaling={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new
    assert old.theta == 5e5
    assert dict(old.scaling) == {"rope_type": "llama3", **LLAMA3}
    assert hash(old) == hash(new)


def test_plain_rope_is_the_default():
    plain = RopeConfig(10_000.0, 16)
    assert hf_config.rope({}, 16) == plain
    assert hf_config.rope({"rope_theta": 10_000}, 16, scaling={"rope_type": "default", "rope_theta": 1e4}) == plain


def test_factors_are_frozen():
    rope = hf_config.rope({}, 4, scaling={"rope_type": "factors", "factors": [1.0, 2.5]})
    assert dict(rope.scaling)["factors"] == (1.0, 2.5)
    assert isinstance(hash(rope), int)


def test_an_unknown_scaling_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="rope scaling 'longrope' is not supported; supported are default, linear, "):
        hf_config.rope({}, 16, scaling={"type": "longrope", "factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "missing"),
    [
        ({"type": "linear"}, "'linear' lacks factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "lacks high_freq_factor, original_max_pos"),
        ({"rope_type": "factors"}, "'factors' lacks factors"),
    ],
)
def test_a_scaling_without_its_numbers_is_refused(scaling, missing):
    with pytest.raises(InputError, match=missing):
        hf_config.rope({}, 16, scaling=scaling)
