import dataclasses

import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.config import LayerKind, ModelConfig, kv_layout
from jaxllm.models.rope import RopeConfig

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
