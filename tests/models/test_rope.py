import math

import numpy as np
import pytest

from jaxllm.models.rope import RopeConfig, no_rope


def plain(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def close(rope: RopeConfig, expected: list[float]) -> None:
    close_freq(rope.inv_freq(), expected)


def close_freq(found: np.ndarray, expected: list[float]) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=3e-6)


def test_default_frequencies_are_powers_of_theta():
    close(RopeConfig(10_000.0, 16), plain(10_000.0, 16))
    close(RopeConfig(500_000.0, 128), plain(500_000.0, 128))


def test_linear_scaling_divides_every_frequency():
    rope = RopeConfig(1e6, 32, (("factor", 8.0), ("rope_type", "linear")))
    close(rope, [freq / 8 for freq in plain(1e6, 32)])


def test_factors_divide_each_frequency_by_its_own():
    factors = (1.0, 2.0, 5.0, 32.0)
    rope = RopeConfig(1e4, 8, (("factors", factors), ("rope_type", "factors")))
    close(rope, [freq / factor for freq, factor in zip(plain(1e4, 8), factors, strict=True)])


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between():
    numbers = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = RopeConfig(5e5, 128, (("rope_type", "llama3"), *numbers.items()))
    expected, kinds = [], set()
    for freq in plain(5e5, 128):
        wavelength = 2 * math.pi / freq
        if wavelength < 8192 / 4:
            kinds.add("kept")
            expected.append(freq)
        elif wavelength > 8192 / 1:
            kinds.add("divided")
            expected.append(freq / 8)
        else:
            kinds.add("blended")
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * freq / 8 + smooth * freq)
    assert kinds == {"kept", "divided", "blended"}
    close(found, expected)


LONG = {"short_factor": (1.0, 1.5, 2.0, 3.0), "long_factor": (2.0, 4.0, 8.0, 16.0), "factor": 8.0}
LONGROPE = RopeConfig(1e4, 8, (("rope_type", "longrope"), ("original_max_position_embeddings", 64), *LONG.items()))


def test_a_rope_that_turns_nothing_leaves_every_feature_alone():
    close(no_rope(16), [0.0] * 8)


def test_longrope_takes_the_long_factors_for_runs_beyond_the_original_length_only():
    for length, factors in ((0, "short_factor"), (64, "short_factor"), (65, "long_factor")):
        expected = [freq / factor for freq, factor in zip(plain(1e4, 8), LONG[factors], strict=True)]
        close(LONGROPE.at_length(length), expected)


def test_longrope_scales_attention_by_the_growth_of_the_context():
    assert LONGROPE.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(64)))
    assert RopeConfig(1e4, 8, (*LONGROPE.scaling, ("attention_factor", 1.25))).attention_factor == 1.25
    unscaled = dict(LONGROPE.scaling) | {"factor": 1.0}
    assert RopeConfig(1e4, 8, tuple(unscaled.items())).attention_factor == 1.0


def test_dynamic_scaling_raises_the_base_by_the_length_of_the_run():
    rope = RopeConfig(1e4, 16, (("rope_type", "dynamic"), ("factor", 4.0), ("original_max_position_embeddings", 64)))
    for length in (0, 17, 64):
        close(rope.at_length(length), plain(1e4, 16))
    base = 1e4 * (4.0 * 128 / 64 - 3.0) ** (16 / 14)
    close(rope.at_length(128), plain(base, 16))
    assert rope.attention_factor == 1.0


def yarn(**options):
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256} | options
    return RopeConfig(1e4, 64, tuple(scaling.items()))


def test_yarn_keeps_fast_waves_divides_slow_ones_and_blends_between():
    found, expected, weights = yarn().inv_freq(), [], []
    low = math.floor(64 * math.log(256 / (32 * 2 * math.pi)) / (2 * math.log(1e4)))
    high = math.ceil(64 * math.log(256 / (1 * 2 * math.pi)) / (2 * math.log(1e4)))
    for i, freq in enumerate(plain(1e4, 64)):
        weights.append(min(max((i - max(low, 0)) / (high - max(low, 0)), 0.0), 1.0))
        expected.append(weights[-1] * freq / 8 + (1 - weights[-1]) * freq)
    assert 0.0 in weights
    assert 1.0 in weights
    assert any(0 < weight < 1 for weight in weights)
    close_freq(found, expected)


@pytest.mark.parametrize("options", [{"factor": 2.0}, {"beta_fast": 4.0}, {"beta_slow": 2.0}, {"truncate": False}])
def test_every_number_of_yarn_moves_the_frequencies(options):
    assert np.abs(yarn(**options).inv_freq() / yarn().inv_freq() - 1).max() > 1e-3


def test_yarn_scales_attention_by_its_factor_its_mscales_or_what_it_is_told():
    plain_factor = 0.1 * math.log(8) + 1
    assert yarn().attention_factor == pytest.approx(plain_factor)
    assert yarn(attention_factor=1.5).attention_factor == 1.5
    assert yarn(mscale=0.7).attention_factor == pytest.approx(plain_factor)
    both = yarn(mscale=0.7, mscale_all_dim=0.5).attention_factor
    assert both == pytest.approx((0.07 * math.log(8) + 1) / (0.05 * math.log(8) + 1))
    assert yarn(factor=1.0).attention_factor == 1.0


@pytest.mark.parametrize("scaling", [(), (("rope_type", "linear"), ("factor", 2.0))])
def test_other_ropes_do_not_depend_on_the_length_and_scale_no_attention(scaling):
    rope = RopeConfig(1e4, 16, scaling)
    np.testing.assert_array_equal(rope.at_length(1 << 20).inv_freq(), rope.inv_freq())
    assert rope.attention_factor == 1.0
