import dataclasses
import itertools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm.config.errors import InputError
from jaxllm.mesh.build import build_mesh
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.heads import HeadLayout, lay_out_heads
from jaxllm.models.norms import AllHeadsNorm
from jaxllm.models.rope import RopeConfig

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49_153,
    d_model=576,
    d_ff=1536,
    num_q_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=16,
    layer_kinds=(LayerKind(),),
    ropes=(RopeConfig(1e4, 64),),
    norm_eps=1e-6,
    attention_scale=0.125,
)
SHAPES = [(g * k, k) for g, k in itertools.product((1, 2, 3, 4, 5, 7, 8, 12), (1, 2, 3, 4, 5, 8, 10, 32))]


def layouts():
    for (num_q_heads, num_kv_heads), tensor in itertools.product(SHAPES, range(1, 17)):
        try:
            yield lay_out_heads(num_q_heads, num_kv_heads, tensor)
        except InputError:
            continue


def test_every_query_head_has_one_place_beside_its_own_kv_head():
    for layout in layouts():
        placed = []
        for slot in range(layout.num_slots):
            queries = layout.q_heads(slot)
            assert len(queries) <= layout.group
            assert all(n // (layout.num_q_heads // layout.num_kv_heads) == layout.kv_head(slot) for n in queries)
            assert (layout.kv_head(slot) is None) == (len(queries) == 0), layout
            placed += queries
        assert placed == list(range(layout.num_q_heads)), layout


def test_every_kv_head_is_held_equally_often_and_ranks_are_equal_in_size():
    for layout in layouts():
        held = [layout.kv_head(slot) for slot in range(layout.num_slots)]
        assert [held.count(head) for head in range(layout.num_kv_heads)] == [layout.replicas] * layout.num_kv_heads
        assert layout.num_slots % layout.tensor == 0


def test_at_most_a_third_is_empty_and_no_other_number_of_replicas_has_fewer_slots_or_places():
    for layout in layouts():
        assert 3 * (layout.places - layout.num_q_heads) <= layout.places
        for replicas in range(1, layout.num_q_heads // layout.num_kv_heads + 1):
            slots = -(-layout.num_kv_heads * replicas // layout.tensor) * layout.tensor
            places = slots * -(-layout.num_q_heads // layout.num_kv_heads // replicas)
            is_allowed = 3 * (places - layout.num_q_heads) <= places
            assert not is_allowed or (slots, places, replicas) >= (layout.num_slots, layout.places, layout.replicas)


def test_what_divides_wastes_nothing():
    for (num_q_heads, num_kv_heads), tensor in itertools.product(SHAPES, (2, 4, 8, 16)):
        if num_kv_heads % tensor == 0:
            assert lay_out_heads(num_q_heads, num_kv_heads, tensor).is_plain
        elif tensor % num_kv_heads == 0 and num_q_heads % tensor == 0:
            layout = lay_out_heads(num_q_heads, num_kv_heads, tensor)
            assert (layout.num_slots, layout.places) == (tensor, num_q_heads)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((32, 8, 4), (1, 4, 8)),
        ((9, 3, 2), (1, 3, 4)),
        ((9, 3, 4), (1, 3, 4)),
        ((14, 2, 4), (2, 4, 4)),
        ((32, 2, 8), (4, 4, 8)),
        ((40, 10, 8), (2, 2, 24)),
        ((12, 12, 8), (1, 1, 16)),
        ((9, 3, 6), (2, 2, 6)),
        ((9, 3, 1), (1, 3, 3)),
    ],
)
def test_known_shapes_are_dealt_as_the_table_says(sizes, expected):
    assert lay_out_heads(*sizes) == HeadLayout(*sizes, *expected)


def test_what_cannot_be_dealt_names_the_sizes_that_would_do():
    with pytest.raises(InputError) as raised:
        SMOLLM2.split(8)
    assert str(raised.value) == (
        "tensor_parallel_size 8: 9 query and 3 KV heads cannot be dealt to 8 ranks without leaving more than a third "
        "of their places empty: 1, 2, 3, 4 or 6 would do"
    )
    with pytest.raises(InputError, match=r"d_ff 1,536 \(config.json: intermediate_size\) is not a multiple of 5: 1, 2"):
        SMOLLM2.split(5)
    with pytest.raises(InputError, match="only 1 would do"):
        dataclasses.replace(SMOLLM2, d_ff=1537).split(3)


def test_a_split_configuration_has_slots_for_heads_and_padded_rows(caplog):
    assert SMOLLM2.split(1) is SMOLLM2
    assert SMOLLM2.vocab_rows == 49_153
    with caplog.at_level(logging.INFO):
        split = SMOLLM2.split(4)
    assert (split.num_q_heads, split.num_kv_heads, split.vocab_rows) == (12, 4, 49_156)
    assert split.heads == lay_out_heads(9, 3, 4)
    assert split.unsplit() == SMOLLM2
    assert [record.getMessage() for record in caplog.records] == [
        "9 query and 3 KV heads on 4 tensor ranks: 3 of 12 places of query heads are empty (25%)"
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO):
        SMOLLM2.split(3)
        dataclasses.replace(SMOLLM2, num_q_heads=14, num_kv_heads=2, d_ff=1536).split(4)
    assert [record.getMessage() for record in caplog.records] == [
        "14 query and 2 KV heads on 4 tensor ranks: each KV head is held 2 times, 2 of 16 places of query heads are "
        "empty (12%)"
    ]


@pytest.mark.parametrize("axis", ["q_heads", "kv_heads"])
def test_a_norm_over_all_heads_does_not_count_what_is_empty_or_repeated(axis):
    cfg = dataclasses.replace(SMOLLM2, num_q_heads=14, num_kv_heads=2, qk_norm="all_heads")
    split, one = cfg.split(4), build_mesh()
    no_kernels: Any = None  # it is XLA's in any case
    layout, whole = split.heads, PartitionSpec()
    assert layout is not None
    num_heads = cfg.num_q_heads if axis == "q_heads" else cfg.num_kv_heads
    x_TNH = np.random.default_rng(0).normal(size=(3, num_heads, cfg.head_dim)).astype(np.float32)
    if axis == "q_heads":
        sources = [n for s in range(layout.num_slots) for n in [*layout.q_heads(s), *[None] * layout.group][:4]]
    else:
        sources = [layout.kv_head(s) for s in range(layout.num_slots)]
    laid_out_TNH = np.stack([x_TNH[:, n] if n is not None else 0 * x_TNH[:, 0] for n in sources], axis=1)

    def normed(config, x):
        norm = AllHeadsNorm(config, x.shape[1], axis)
        run = jax.shard_map(lambda x: norm(x, no_kernels), mesh=one, in_specs=whole, out_specs=whole)
        return np.asarray(run(jnp.asarray(x)))

    expected, found = normed(cfg, x_TNH), normed(split, laid_out_TNH)
    for place, source in enumerate(sources):
        wanted = 0 if source is None else expected[:, source]
        np.testing.assert_allclose(found[:, place], wanted, rtol=1e-6)
