import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.mesh import planner
from jaxllm.mesh.cost_model import ModelShape, Shard, read_device
from jaxllm.mesh.planner import Limits, MeshShape, Traffic, blocks_of, make_plan, mesh_shapes
from jaxllm.mesh.targets import memory_of
from jaxllm.scheduler.kv_groups import KVGroups

FOLDER = Path(__file__).parents[2] / "mesh" / "devices"
H200, A100 = (read_device((FOLDER / f"{name}.json").read_text()) for name in ("h200", "a100-80g"))


def llama_70b_shard(t):
    return Shard(
        num_q_heads=64 // t,
        num_kv_heads=8 // t,
        d_ff=28672 // t,
        vocab_rows=128256 // t,
        layer_bytes=1_711_308_800 / t,
        embedding_bytes=2_101_346_304 // t,
        head_bytes=2_101_346_304 // t,
        kv_slot_bytes=80 * 2 * 8 * 128 * 2 // t,
        temporary_bytes=(200_000 // t, 1_500_000, 64 << 20),
    )


LLAMA_70B = ModelShape(
    name="70b",
    num_layers=80,
    d_model=8192,
    head_dim=128,
    vocab_size=128256,
    max_position=131072,
    gated_mlp=True,
    sums_per_layer=2,
    tied=False,
    itemsize=2,
    kv_itemsize=2,
    windows=(None,) * 80,
    group_windows=(None,),
    shards={t: llama_70b_shard(t) for t in (1, 2, 4, 8)},
    refused={16: "16 ranks are too many"},
)
TRAFFIC = Traffic(input_len=512, output_len=256)


def candidates(plan):
    return {(c.mesh.data, c.mesh.tensor, c.mesh.pipe): c for c in plan.candidates}


def best(plan):
    assert plan.for_throughput is not None
    return plan.for_throughput


def point_of(candidate):
    assert candidate.operating is not None
    return candidate.operating


def settings_of(candidate):
    assert candidate.settings is not None
    return candidate.settings


def test_every_way_to_lay_out_the_devices_is_listed_once():
    shapes = mesh_shapes(8)
    assert len(set(shapes)) == len(shapes) == 10
    assert all(s.data * s.tensor * s.pipe == 8 for s in shapes)
    assert mesh_shapes(1) == [MeshShape(1, 1, 1)]
    assert {(s.data, s.tensor, s.pipe) for s in mesh_shapes(6)} >= {(2, 3, 1), (1, 2, 3), (6, 1, 1)}


def test_what_does_not_fit_says_why_and_what_cannot_be_split_too():
    found = candidates(make_plan(LLAMA_70B, A100, 16, TRAFFIC))
    assert "141.1 GB of weights" in found[16, 1, 1].reason
    assert found[16, 1, 1].operating is None
    assert found[1, 16, 1].reason == "16 ranks are too many"
    assert found[4, 4, 1].reason == ""


def test_the_batch_follows_from_the_target():
    free = candidates(make_plan(LLAMA_70B, A100, 8, TRAFFIC))[1, 8, 1]
    for tpot in (0.03, 0.05, 0.08):
        plan = make_plan(LLAMA_70B, A100, 8, dataclasses.replace(TRAFFIC, tpot=tpot))
        candidate = candidates(plan)[1, 8, 1]
        assert point_of(candidate).tpot <= tpot
        limits, at = Limits(), point_of(candidate).batch + 1
        beyond = planner.point(LLAMA_70B, A100, candidate.mesh, plan.traffic, limits, at)
        assert beyond.tpot > tpot
        assert settings_of(candidate).max_num_seqs == point_of(candidate).batch < point_of(free).batch


def test_a_target_that_nobody_keeps_is_told_with_what_the_best_takes():
    plan = make_plan(LLAMA_70B, A100, 8, dataclasses.replace(TRAFFIC, tpot=0.001))
    assert plan.for_throughput is None
    assert plan.for_latency is None
    assert plan.why.startswith("no shape keeps the targets: data=1 x tensor=8 takes TTFT")


def test_a_rate_gives_the_batch_that_carries_it_and_rows_for_its_bursts():
    plan = make_plan(LLAMA_70B, A100, 8, dataclasses.replace(TRAFFIC, request_rate=4.0))
    chosen = best(plan)
    assert point_of(chosen).requests_per_second >= 4.0
    # Little: as many run as arrive while one runs.
    running = 4.0 / chosen.mesh.data * point_of(chosen).tpot * TRAFFIC.output_len
    assert point_of(chosen).batch - 1 < running + 1
    assert settings_of(chosen).max_num_seqs > point_of(chosen).batch
    over = make_plan(LLAMA_70B, A100, 8, dataclasses.replace(TRAFFIC, request_rate=1e4))
    assert over.for_throughput is None
    assert over.why.startswith("no shape carries 10000 requests/s")


def test_with_a_rate_the_best_for_throughput_is_the_one_with_the_most_in_reserve():
    plan = make_plan(LLAMA_70B, A100, 8, dataclasses.replace(TRAFFIC, request_rate=1.0), Limits(stages=False))
    reserve = {c.mesh: c.most.requests_per_second for c in plan.may_be_best() if c.most is not None}
    assert best(plan).mesh == max(reserve, key=lambda mesh: reserve[mesh])
    assert reserve[best(plan).mesh] > point_of(best(plan)).requests_per_second


def test_one_request_wants_tensor_ranks_and_many_want_copies():
    plan = make_plan(LLAMA_70B, A100, 8, TRAFFIC, Limits(stages=False))
    assert plan.for_latency is not None
    assert plan.for_latency.mesh == MeshShape(1, 8, 1)
    assert best(plan).mesh == MeshShape(2, 4, 1)
    assert "a single request is answered soonest by data=1 x tensor=8" in plan.why


def test_shapes_with_stages_are_shown_and_not_named_where_the_engine_cannot_run_them():
    plan = make_plan(LLAMA_70B, A100, 8, TRAFFIC, Limits(stages=False))
    assert best(plan).mesh.pipe == 1
    staged = candidates(plan)[2, 1, 4]
    assert staged.operating is not None
    assert any("pipeline-parallel-size is refused" in warning for warning in staged.warnings)


def test_a_tight_target_makes_the_budget_smaller_and_no_target_leaves_it():
    tight = make_plan(LLAMA_70B, A100, 8, dataclasses.replace(TRAFFIC, tpot=0.04))
    assert settings_of(best(tight)).max_num_batched_tokens < 8192
    assert settings_of(best(make_plan(LLAMA_70B, A100, 8, TRAFFIC))).max_num_batched_tokens == 8192


def warned(plan, mesh):
    return " | ".join(candidates(plan)[mesh].warnings)


def test_the_rules_of_thumb_warn():
    shape = dataclasses.replace(LLAMA_70B, shards={**LLAMA_70B.shards, 16: llama_70b_shard(8)})
    assert "tensor=16 crosses nodes of 8: 160 all-reduces" in warned(make_plan(shape, A100, 16, TRAFFIC), (1, 16, 1))
    assert "weights leave too little KV" in warned(make_plan(LLAMA_70B, A100, 2, TRAFFIC), (1, 2, 1))
    seqs = make_plan(LLAMA_70B, A100, 4, TRAFFIC, Limits(max_num_seqs=1000))
    assert "max_num_seqs 1000 exceeds what the pool holds" in warned(seqs, (1, 4, 1))
    small = dataclasses.replace(
        LLAMA_70B, d_model=576, shards={8: dataclasses.replace(llama_70b_shard(8), d_ff=192, num_q_heads=2)}
    )
    assert "shards are too small" in warned(make_plan(small, A100, 8, TRAFFIC), (1, 8, 1))
    assert warned(make_plan(LLAMA_70B, A100, 8, TRAFFIC), (1, 8, 1)) == ""


def test_repeated_kv_heads_are_told_as_what_they_cost():
    twice = dataclasses.replace(llama_70b_shard(8), num_kv_heads=2)
    shape = dataclasses.replace(LLAMA_70B, shards={1: llama_70b_shard(1), 8: twice})
    assert "16 KV heads are held where the model has 8" in warned(make_plan(shape, A100, 8, TRAFFIC), (1, 8, 1))


@pytest.mark.parametrize("windows", [(None,), (512,) * 5 + (None,), (100, None)])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 511, 512, 513, 3000])
def test_a_decoding_request_holds_the_blocks_that_the_scheduler_lends(windows, num_tokens):
    shape = dataclasses.replace(LLAMA_70B, group_windows=windows)
    groups = KVGroups(windows)
    last = -(-num_tokens // 16)
    held = sum(last - groups.first_block(g, num_tokens - 1, 16) for g in range(len(windows)))
    assert blocks_of(shape, num_tokens, Limits()) == held


def test_a_process_has_of_a_card_what_the_engine_counts_with():
    card: Any = SimpleNamespace(device_kind="NVIDIA H200")
    assert int(H200.memory_bytes * planner.PROCESS_SHARE) == memory_of(card)
