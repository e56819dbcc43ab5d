import dataclasses
import json
from pathlib import Path

import pytest

from jaxllm.mesh.cost_model import (
    Link,
    ModelShape,
    Shard,
    StepLoad,
    device_from,
    read_device,
    stage_layers,
    step_time,
)

ROOT = Path(__file__).parents[2]
DEVICES = {path.stem: read_device(path.read_text()) for path in (ROOT / "mesh" / "devices").glob("*.json")}
H200 = DEVICES["h200"]


def shard(num_q_heads, num_kv_heads, d_ff, vocab_rows):
    return Shard(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        d_ff=d_ff,
        vocab_rows=vocab_rows,
        layer_bytes=0,
        embedding_bytes=0,
        head_bytes=0,
        kv_slot_bytes=0,
        temporary_bytes=(0, 0, 0),
    )


def shape(num_layers, d_model, num_q_heads, num_kv_heads, d_ff, vocab_size, window=None):
    return ModelShape(
        name="shape",
        num_layers=num_layers,
        d_model=d_model,
        head_dim=128,
        vocab_size=vocab_size,
        max_position=4096,
        gated_mlp=True,
        sums_per_layer=2,
        tied=False,
        itemsize=2,
        kv_itemsize=2,
        windows=(window,) * num_layers,
        group_windows=(window,),
        shards={t: shard(num_q_heads // t, num_kv_heads // t, d_ff // t, vocab_size // t) for t in (1, 2, 4, 8)},
        refused={},
    )


LLAMA_8B = shape(32, 4096, 32, 8, 14336, 128256)
QWEN_06B = shape(28, 1024, 16, 8, 3072, 151936)


def decoding(batch, context):
    return StepLoad(batch, batch * context)


def prompts(num_tokens, context, count):
    return StepLoad(0, 0, num_tokens, num_tokens * context, count)


def measured_in(workload):
    rows = json.loads((ROOT / "docs" / "benchmarks" / "engine-h200.json").read_text())["rows"]
    result = next(row["result"] for row in rows if row["workload"] == workload and row["status"] == "measured")
    return {name: spread["p50"] for name, spread in result["latencies_ms"].items()}


@pytest.mark.parametrize(
    ("model", "load", "measured"),
    [  # of one H200: docs/benchmarks/engine-h200.json, and docs/log.md for the others
        (LLAMA_8B, decoding(1, 256), measured_in("L1")["itl"]),
        (LLAMA_8B, decoding(8, 256), measured_in("L8")["itl"]),
        (LLAMA_8B, decoding(256, 384), measured_in("W1")["itl"]),
        (LLAMA_8B, prompts(1024, 64, 8), measured_in("L8")["ttft"]),
        (LLAMA_8B, prompts(8192, 1000, 4.1), measured_in("W3")["itl"]),
        (QWEN_06B, decoding(1, 256), 1.36),
        (QWEN_06B, decoding(8, 256), 1.41),
    ],
)
def test_steps_that_an_h200_ran_come_out_within_a_tenth(model, load, measured):
    device = dataclasses.replace(H200, host_us=0.0, host_request_us=0.0)
    assert step_time(model, device, load).total * 1e3 == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("rows", "measured"), [(1, 2.75), (8, 3.17)])
def test_a_decode_step_of_two_h200s_is_near_what_was_measured(rows, measured):
    assert step_time(LLAMA_8B, H200, decoding(rows, 256), tensor=2).total * 1e3 == pytest.approx(measured, rel=0.15)


def test_a_layer_has_two_all_reduces_and_a_step_two_more():
    spent = step_time(LLAMA_8B, H200, decoding(1, 128), tensor=2)
    assert spent.all_reduce_latency == pytest.approx((2 * 32 + 2) * H200.link(2).latency_us * 1e-6)
    assert step_time(LLAMA_8B, H200, decoding(1, 128)).all_reduce == 0


def test_each_product_has_its_own_rows():
    # 4,096 tokens of one prompt pay for the head of one row, 4,096 decoding requests for as many rows.
    one = step_time(LLAMA_8B, H200, prompts(4096, 0, 1))
    many = step_time(LLAMA_8B, H200, decoding(4096, 0))
    head = 2 * 4096 * 4096 * 128256 / H200.matmul_flops
    assert many.compute - one.compute == pytest.approx(head, rel=0.05)  # a part of it hides behind reading
    assert many.weights == one.weights == pytest.approx(15.0e9 / H200.read_bandwidth, rel=0.01)


def test_small_steps_cost_what_reading_costs_and_large_ones_what_multiplying_costs():
    small, large = step_time(LLAMA_8B, H200, decoding(1, 0)), step_time(LLAMA_8B, H200, prompts(65536, 0, 1))
    assert small.compute < 0.02 * small.weights
    assert large.weights + large.compute == pytest.approx(
        65536 * 2 * 6.98e9 / H200.matmul_flops, rel=0.15
    )  # features' way through memory is the rest


def test_a_window_bounds_the_keys_that_are_read():
    sliding = shape(32, 4096, 32, 8, 14336, 128256, window=512)
    assert step_time(sliding, H200, decoding(4, 4096)).kv == pytest.approx(
        step_time(LLAMA_8B, H200, decoding(4, 512)).kv
    )


def test_parts_add_up_and_the_host_shows_only_beyond_the_device():
    spent = step_time(LLAMA_8B, H200, decoding(64, 512), tensor=4, pipe=2)
    assert sum(spent.parts().values()) == pytest.approx(spent.total)
    assert spent.host == 0
    tiny = shape(2, 256, 2, 2, 512, 1000)
    tiny = dataclasses.replace(tiny, shards={1: shard(2, 2, 512, 1000)})
    assert step_time(tiny, H200, decoding(1, 8)).total * 1e6 == pytest.approx(
        H200.host_us + H200.host_request_us, rel=1e-6
    )


def test_stages_take_a_part_of_the_requests_each_and_the_longest_sets_the_pace():
    assert [len(layers) for layers in stage_layers(32, 3)] == [11, 11, 10]
    whole, halves = (step_time(LLAMA_8B, H200, decoding(64, 512), pipe=p) for p in (1, 2))
    assert whole.bubble == 0
    assert halves.bubble > 0
    assert halves.kv == pytest.approx(whole.kv / 2)  # 32 requests pass both stages
    assert halves.weights == pytest.approx(whole.weights)
    alone = step_time(LLAMA_8B, H200, decoding(1, 512), pipe=2)
    assert alone.total >= step_time(LLAMA_8B, H200, decoding(1, 512)).total


def test_tensor_ranks_beyond_a_node_go_over_the_link_between_nodes():
    assert H200.link(2) != H200.link(8)
    assert H200.link(16) == H200.between_nodes
    assert H200.link(3).ranks == 4


def test_a_description_survives_json_and_a_wrong_one_is_named():
    described = json.loads(json.dumps(H200.as_json()))
    assert device_from(described) == H200
    for change, said in (
        ({"matmul_flops": -1}, "matmul_flops must be a number"),
        ({"read_bandwidth": 0}, "read_bandwidth must be above 0"),
        ({"blend": 0.5}, "blend must be at least 1"),
        ({"links": []}, "links is empty"),
        ({"links": [{"ranks": 2}]}, "links:"),
        ({"speed": 1}, "unknown field 'speed'"),
    ):
        with pytest.raises(ValueError, match=said):
            device_from(described | change)
    del described["blend"]
    with pytest.raises(ValueError, match="missing field 'blend'"):
        device_from(described)
    with pytest.raises(ValueError, match="JSON object"):
        read_device("[]")


def test_what_was_not_measured_says_so():
    assert {name for name, device in DEVICES.items() if device.measured} == {"h200"}
    assert all(device.source.startswith("Not measured.") for device in DEVICES.values() if not device.measured)
    assert all(isinstance(link, Link) for device in DEVICES.values() for link in device.links)
