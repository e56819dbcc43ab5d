import dataclasses
import json
from pathlib import Path

import pytest

import jaxllm.models
from jaxllm.bench.ceilings import Ceilings, measure_ceilings
from jaxllm.bench.floors import ModelWork, floor_of, work_of
from jaxllm.bench.workloads import workload_lengths
from jaxllm.models.config import ModelConfig
from jaxllm.models.registry import find_family

H200 = Ceilings(copy=4.1e12, matmul=790e12)
# 100 bytes of weights; 10 FLOPs of a token, 4 of its logits, 2 of a token and a key; 3 bytes of KV; two layers.
WORK = ModelWork(weight_bytes=100, layer_flops=10, head_flops=4, pair_flops=2, kv_bytes=3, windows=(None, 2))
SLOW_MEMORY, SLOW_PRODUCTS = Ceilings(copy=1.0, matmul=1e9), Ceilings(copy=1e9, matmul=1.0)


def shape_of(name: str) -> ModelConfig:
    hf = json.loads((Path(jaxllm.models.__file__).parent / "shapes" / f"{name}.json").read_text())
    return dataclasses.replace(find_family(hf)[1].configure(hf), dtype="bfloat16")


def test_an_8b_model_costs_what_is_known_of_it():
    work = work_of(shape_of("llama-3.1-8b"), "bfloat16")
    assert work.weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert work.kv_bytes * len(work.windows) == 131_072
    assert (work.layer_flops + work.head_flops) / 2 == pytest.approx(7.5e9, rel=1e-2)
    assert work_of(shape_of("llama-3.1-8b"), "uint8").kv_bytes * 2 == work.kv_bytes


def test_tied_embeddings_are_read_as_the_head():
    cfg = shape_of("qwen3-0.6b")
    assert cfg.tie_embeddings
    apart = dataclasses.replace(cfg, tie_embeddings=False)
    assert work_of(cfg, "bfloat16").weight_bytes == work_of(apart, "bfloat16").weight_bytes


def test_a_step_of_256_sequences_takes_8_ms_at_least_on_an_h200():
    floor = floor_of(work_of(shape_of("llama-3.1-8b"), "bfloat16"), H200, workload_lengths("W1"), 256)
    assert floor.tpot == pytest.approx(8.0e-3, rel=0.01)
    one = floor_of(work_of(shape_of("llama-3.1-8b"), "bfloat16"), H200, workload_lengths("L1"), 256)
    assert one.tpot == pytest.approx(3.67e-3, rel=0.01)
    assert one.ttft == pytest.approx(3.66e-3, rel=0.01)


def test_where_memory_is_slow_weights_and_keys_are_what_counts():
    floor = floor_of(WORK, SLOW_MEMORY, [(3, 3)] * 2, num_rows=2)
    # Outputs at positions 3 and 4 see 4 and 5 keys in one layer, 2 each in the other.
    pairs = 2 * (4 + 5 + 2 + 2)
    assert floor.total == pytest.approx(3 * 100 + pairs * 3)
    assert floor.tpot == pytest.approx(100 + pairs * 3 / 2)
    assert floor.ttft == pytest.approx(100)


def test_fewer_rows_take_more_steps_and_read_the_weights_more_often():
    few, many = (floor_of(WORK, SLOW_MEMORY, [(3, 3)] * 4, num_rows=rows) for rows in (1, 4))
    assert few.total - many.total == pytest.approx((12 - 3) * 100)


def test_where_products_are_slow_tokens_are_what_counts():
    floor = floor_of(WORK, SLOW_PRODUCTS, [(3, 3)], num_rows=1)
    pairs_of_prompt = (1 + 2 + 3) + (1 + 2 + 2)
    assert floor.total == pytest.approx(5 * 10 + 3 * 4 + pairs_of_prompt * 2, rel=1e-5)
    assert floor.ttft == pytest.approx(3 * 10 + 4 + pairs_of_prompt * 2, rel=1e-5)
    assert floor.tpot == pytest.approx(10 + 4, rel=1e-5)


def test_the_ceilings_of_this_machine_are_numbers():
    found = measure_ceilings(shrink=64, dtype="float32")
    assert 1e6 < found.copy < 1e14
    assert 1e6 < found.matmul < 1e16
    assert "GB/s" in str(found)
