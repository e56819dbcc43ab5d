import pytest

from jaxllm.config.errors import InputError
from jaxllm.models import hf_rope
from jaxllm.models.rope import RopeConfig

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_both_spellings_of_rope_give_the_same():
    old = hf_rope.rope({"rope_theta": 5e5}, 16, scaling={"type": "llama3", **LLAMA3})
    new = hf_rope.rope({}, 16, scaling={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert old == new
    assert old.theta == 5e5
    assert dict(old.scaling) == {"rope_type": "llama3", **LLAMA3}
    assert hash(old) == hash(new)


def test_plain_rope_is_the_default():
    plain = RopeConfig(10_000.0, 16)
    assert hf_rope.rope({}, 16) == plain
    assert hf_rope.rope({"rope_theta": 10_000}, 16, scaling={"rope_type": "default", "rope_theta": 1e4}) == plain


def test_factors_are_frozen():
    rope = hf_rope.rope({}, 4, scaling={"rope_type": "factors", "factors": [1.0, 2.5]})
    assert dict(rope.scaling)["factors"] == (1.0, 2.5)
    assert isinstance(hash(rope), int)


def test_an_unknown_scaling_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="rope scaling 'mrope' is not supported; supported are default, linear, "):
        hf_rope.rope({}, 16, scaling={"type": "mrope", "factor": 2.0})


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
        hf_rope.rope({}, 16, scaling=scaling)


def options(rope):
    return dict(rope.scaling)


def test_part_of_each_head_turns_where_the_family_or_the_file_says_so():
    assert hf_rope.rope({}, 16, partial=0.5).dim == 8
    assert hf_rope.rope({"partial_rotary_factor": 0.75}, 16, partial=0.5).dim == 12
    assert hf_rope.rope({"rope_parameters": {"partial_rotary_factor": 0.25}}, 16, partial=0.5).dim == 4
    assert hf_rope.rope({"partial_rotary_factor": 1.0}, 16).dim == 16
    with pytest.raises(InputError, match=r"partial_rotary_factor=0\.5 is not supported for this architecture"):
        hf_rope.rope({"partial_rotary_factor": 0.5}, 16)


def test_what_yarn_and_longrope_leave_out_comes_from_the_lengths_around_them():
    around = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    yarn = options(hf_rope.rope(around, 16, scaling={"type": "yarn"}))
    assert (yarn["original_max_position_embeddings"], yarn["factor"]) == (64, 8.0)
    inside = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    yarn = options(hf_rope.rope({"max_position_embeddings": 512}, 16, scaling=inside))
    assert (yarn["original_max_position_embeddings"], yarn["factor"]) == (128, 4.0)
    long = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert options(hf_rope.rope(around, 16, scaling=long))["factor"] == 8.0
    with pytest.raises(InputError, match="rope scaling 'yarn' lacks original_max_position_embeddings"):
        hf_rope.rope({}, 16, scaling={"type": "yarn", "factor": 2.0})


def test_the_context_grows_with_yarn_and_dynamic_scaling_only():
    hf = {"max_position_embeddings": 64}
    for kind, longest in (("yarn", 256), ("dynamic", 256), ("linear", 64)):
        assert hf_rope.max_position(hf, hf_rope.rope(hf, 16, scaling={"type": kind, "factor": 4.0})) == longest
    grown = {"max_position_embeddings": 512}
    inside = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert hf_rope.max_position(grown, hf_rope.rope(grown, 16, scaling=inside)) == 512


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "linear", "factor": 2.0, "mscale": 0.7}, "'linear' with mscale=0.7 is not supported"),
        ({"type": "default", "mrope_section": [1]}, r"'default' with mrope_section=\[1\] is not supported"),
        (
            {"type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0] * 8},
            "short_factor has 1 numbers, 8 frequencies need one each",
        ),
        ({"rope_type": "factors", "factors": [1.0]}, "factors has 1 numbers, 8 frequencies need one each"),
    ],
)
def test_a_scaling_with_numbers_that_are_not_used_or_do_not_fit_is_refused(scaling, message):
    with pytest.raises(InputError, match=message) as raised:
        hf_rope.rope({"max_position_embeddings": 64}, 16, scaling=scaling)
    assert "\n" not in str(raised.value)
