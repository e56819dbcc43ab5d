import dataclasses
import math

import numpy as np
import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.config import LayerKind, ModelConfig, RopeConfig, kv_layout

SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    d_model=4,
    d_ff=4,
    num_q_heads=6,
    num_kv_heads=2,
    head_dim=4,
    max_position=16,
    layer_kinds=(LayerKind(),) * 2,
    ropes=(RopeConfig(1e4, 4),),
    norm_eps=1e-6,
    attention_scale=0.5,
)


def plain(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def close(found: np.ndarray, expected: list[float]) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=3e-6)


def test_default_frequencies_are_powers_of_theta():
    close(RopeConfig(10_000.0, 16).inv_freq(), plain(10_000.0, 16))
    close(RopeConfig(500_000.0, 128).inv_freq(), plain(500_000.0, 128))


def test_linear_scaling_divides_every_frequency():
    rope = RopeConfig(1e6, 32, (("factor", 8.0), ("rope_type", "linear")))
    close(rope.inv_freq(), [freq / 8 for freq in plain(1e6, 32)])


def test_factors_divide_each_frequency_by_its_own():
    factors = (1.0, 2.0, 5.0, 32.0)
    rope = RopeConfig(1e4, 8, (("factors", factors), ("rope_type", "factors")))
    close(rope.inv_freq(), [freq / factor for freq, factor in zip(plain(1e4, 8), factors, strict=True)])


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between():
    numbers = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = RopeConfig(5e5, 128, (("rope_type", "llama3"), *numbers.items())).inv_freq()
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


def test_layers_of_one_kind_form_one_group():
    layout = kv_layout((LayerKind(),) * 30)
    assert layout.windows == (None,)
    assert layout.layers_per_group == 30
    assert layout.group == (0,) * 30
    assert layout.slot == tuple(range(30))


def test_gemma_3_270m_has_six_groups_of_three():
    kinds = tuple(LayerKind(None, 0) if l % 6 == 5 else LayerKind(512, 1) for l in range(18))
    layout = kv_layout(kinds)
    assert layout.layers_per_group == 3
    assert sorted(layout.windows, key=str) == [512] * 5 + [None]
    for l, kind in enumerate(kinds):
        assert layout.windows[layout.group[l]] == kind.window
    assert len(set(zip(layout.group, layout.slot, strict=True))) == 18, "two layers share a place in the cache"
    assert set(layout.slot) == {0, 1, 2}


def test_layers_that_all_differ_form_groups_of_one():
    layout = kv_layout((LayerKind(8), LayerKind(16), LayerKind(None)))
    assert layout.windows == (8, 16, None)
    assert layout.group == (0, 1, 2)
    assert layout.slot == (0, 0, 0)
    assert layout.layers_per_group == 1


def test_the_rope_of_a_layer_does_not_split_its_group():
    assert kv_layout((LayerKind(None, 0), LayerKind(None, 1))).layers_per_group == 2


def test_groups_have_the_greatest_common_size():
    layout = kv_layout((LayerKind(8),) * 4 + (LayerKind(None),) * 6)
    assert layout.layers_per_group == 2
    assert layout.windows == (8, 8, None, None, None)


def test_the_layout_of_a_config_is_made_once():
    assert SMALL.num_layers == 2
    assert SMALL.kv_layout is SMALL.kv_layout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "6 attention heads are not a multiple of 4 KV heads"),
        ({"num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"layer_kinds": ()}, "num_layers must be at least 1, got 0"),
        ({"vocab_size": -3}, "vocab_size must be at least 1, got -3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(SMALL, **changes)
