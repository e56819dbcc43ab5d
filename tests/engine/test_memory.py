import dataclasses
import re

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.engine import memory
from jaxllm.engine.memory import (
    above_on_grid,
    block_bytes,
    bytes_per_device,
    on_grid,
    plan_memory,
    show_bytes,
    temporaries_bound,
)
from jaxllm.models.config import LayerKind, ModelConfig, RopeConfig
from jaxllm.models.read_config import read_config
from jaxllm.models.registry import find_family
from jaxllm.models.shapes import find_shape

GIB = 1 << 30
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    d_model=64,
    d_ff=64,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=16,
    max_position=4096,
    layer_kinds=(LayerKind(),) * 4,
    ropes=(RopeConfig(1e4, 16),),
    norm_eps=1e-6,
    attention_scale=0.25,
)
# 6 groups of 3, as Gemma 3 270M.
SLIDING = dataclasses.replace(
    MODEL, layer_kinds=tuple(LayerKind(None if l % 6 == 5 else 512) for l in range(18)), max_position=32768
)
PER_BLOCK = 4 * 2 * 2 * 16 * 16 * 4  # layers, k and v, KV heads, tokens, features, bytes


@dataclasses.dataclass
class FakeDevice:
    """Stands in for a GPU (or a CPU): says how much memory it has."""

    platform: str = "gpu"
    bytes_limit: int = 10 * GIB
    bytes_in_use: int = 0

    def memory_stats(self):
        return {"bytes_limit": self.bytes_limit, "bytes_in_use": self.bytes_in_use}


CPU = FakeDevice("cpu")


def plan(device, weights=0, temporaries=0, cfg=MODEL, kv_dtype=None, inbox=0, **args):
    return plan_memory(
        EngineArgs(**args),
        cfg,
        [device],
        chunk=64,
        weights=weights,
        temporaries=temporaries,
        inbox=inbox,
        kv_dtype=kv_dtype,
    )


def refusal(*given, **args):
    with pytest.raises(InputError) as raised:
        plan(*given, **args)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 10**7))
def test_the_grid_is_never_coarser_than_a_64th(num_blocks):
    down, up = on_grid(num_blocks), above_on_grid(num_blocks)
    assert down <= num_blocks <= up
    assert (num_blocks - down) * 64 <= num_blocks
    assert on_grid(down) == down
    assert on_grid(up) == up


def test_a_little_less_memory_gives_the_same_number_of_blocks():
    assert on_grid(64) == 64
    assert on_grid(127) == 127
    assert on_grid(10_000) == on_grid(9_990) == 9_984
    assert len({on_grid(n) for n in range(100_000, 200_000)}) < 130


def test_a_block_holds_keys_and_values_of_one_group():
    assert block_bytes(MODEL, 16, 4) == PER_BLOCK
    assert block_bytes(SLIDING, 32, 2) == 3 * 2 * 2 * 32 * 16 * 2


def test_a_gpu_gives_its_share_less_weights_and_temporaries():
    found = plan(FakeDevice(bytes_limit=10 * GIB), weights=2 * GIB, temporaries=GIB, gpu_memory_utilization=0.8)
    assert found.num_blocks == on_grid(5 * GIB // PER_BLOCK)
    assert 5 * GIB * 63 // 64 <= found.pool <= 5 * GIB
    assert found.num_tokens == (found.num_blocks - 1) * 16
    assert found.bytes_per_token == PER_BLOCK / 16
    assert found.max_model_len == 4096
    rows = dict(found.rows())
    assert rows["weights"] == "2.00 GiB"
    assert rows["largest temporary"] == "1.00 GiB"
    assert rows["left"] == show_bytes(10 * GIB - 3 * GIB - found.pool)
    assert rows["KV per token"] == f"{PER_BLOCK // 16:,} bytes"


def test_what_other_tensor_ranks_write_into_has_its_place():
    found = plan(FakeDevice(bytes_limit=10 * GIB), weights=GIB, inbox=GIB, gpu_memory_utilization=0.8)
    assert found.num_blocks == on_grid(6 * GIB // PER_BLOCK)
    rows = dict(found.rows())
    assert rows["inbox of tensor ranks"] == "1.00 GiB"
    assert rows["left"] == show_bytes(10 * GIB - 2 * GIB - found.pool)


@pytest.mark.parametrize(("kv_dtype", "times"), [("uint8", 4), ("bfloat16", 2), ("float32", 1)])
def test_blocks_are_sized_by_the_type_of_the_cache(kv_dtype, times):
    found = plan(CPU, kv_dtype=kv_dtype, kv_cache_memory_bytes=64 * PER_BLOCK)
    assert found.block_bytes == PER_BLOCK // times
    assert found.num_blocks == 64 * times


def test_what_else_the_process_holds_on_the_gpu_is_left_alone():
    shared = plan(FakeDevice(bytes_in_use=4 * GIB), weights=GIB, gpu_memory_utilization=0.9)
    assert shared.num_blocks == on_grid((9 - 4 - 1) * GIB // PER_BLOCK)


def test_a_block_of_a_16_bit_model_takes_half():
    assert plan(CPU, cfg=dataclasses.replace(MODEL, dtype="bfloat16")).block_bytes == PER_BLOCK // 2


def test_a_cpu_gives_a_gibibyte_or_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "host_memory", lambda: 100 * GIB)
    assert plan(CPU, weights=50 * GIB).num_blocks == on_grid(GIB // PER_BLOCK)
    monkeypatch.setattr(memory, "host_memory", lambda: GIB)
    assert plan(CPU).num_blocks == on_grid(GIB // 2 // PER_BLOCK)
    assert plan(CPU).device == 0
    assert "left" not in dict(plan(CPU).rows())


def test_host_memory_is_read_from_the_system():
    assert 1 << 20 < memory.host_memory() < 1 << 50


def test_bytes_and_blocks_that_the_user_gives_override_the_share():
    device = FakeDevice(bytes_limit=GIB)
    assert plan(device, weights=5 * GIB, kv_cache_memory_bytes=100 * PER_BLOCK).num_blocks == 100
    both = plan(device, weights=5 * GIB, kv_cache_memory_bytes=PER_BLOCK, num_gpu_blocks_override=9_999)
    assert both.num_blocks == 9_999  # as the user says, not on the grid


def test_the_longest_request_is_what_the_pool_holds_if_the_user_leaves_it_open():
    small = plan(CPU, num_gpu_blocks_override=11)
    assert small.max_model_len == small.num_tokens == 160  # block 0 is reserved
    assert plan(CPU, num_gpu_blocks_override=1000).max_model_len == 4096
    assert plan(CPU, num_gpu_blocks_override=1000, max_model_len=77).max_model_len == 77
    groups = plan(CPU, cfg=SLIDING, num_gpu_blocks_override=100)
    assert groups.max_model_len == 99 // 6 * 16  # each 16 tokens take a block in each of 6 groups


def test_a_gpu_without_room_says_where_the_memory_went():
    message = refusal(FakeDevice(), weights=9 * GIB, temporaries=GIB // 2)
    assert "90% of 10.00 GiB less 9.00 GiB in use (9.00 GiB of it weights) and 512.0 MiB of temporaries" in message
    assert "raise gpu_memory_utilization or lower max_num_batched_tokens" in message


def numbers_after(words, message):
    return int(re.findall(words + r" to ([\d,]+)", message)[0].replace(",", ""))


@pytest.mark.parametrize("cfg", [MODEL, SLIDING], ids=["one_group", "six_groups"])
@pytest.mark.parametrize("length", [100, 2000, 2047, 4096])
def test_a_pool_that_is_too_small_says_which_size_would_do(cfg, length):
    args = {"cfg": cfg, "max_model_len": length}
    message = refusal(CPU, kv_cache_memory_bytes=3 * block_bytes(cfg, 16, 4), **args)
    assert "the KV pool of 3 blocks (" in message
    assert f"fewer than max_model_len {length:,}: lower max_model_len, or raise kv_cache_memory_bytes to" in message
    enough = numbers_after("kv_cache_memory_bytes", message)
    assert plan(CPU, kv_cache_memory_bytes=enough, **args).max_model_len == length

    message = refusal(CPU, num_gpu_blocks_override=3, **args)
    enough = numbers_after("num_gpu_blocks_override", message)
    assert plan(CPU, num_gpu_blocks_override=enough, **args).max_model_len == length
    refusal(CPU, num_gpu_blocks_override=enough - 1, **args)


def test_the_share_is_named_only_where_it_counts():
    tight = FakeDevice(bytes_limit=4 * PER_BLOCK)
    assert refusal(tight, max_model_len=4000).endswith(" or gpu_memory_utilization")
    assert "utilization" not in refusal(tight, max_model_len=4000, kv_cache_memory_bytes=PER_BLOCK)
    assert "utilization" not in refusal(CPU, max_model_len=4000, kv_cache_memory_bytes=PER_BLOCK)


def test_a_pool_below_one_block_is_refused_even_if_the_length_is_open():
    assert "the KV pool of 0 blocks (0 bytes) holds 0 tokens" in refusal(CPU, kv_cache_memory_bytes=1)


def test_bytes_are_counted_and_shown():
    tree = {"a": jnp.zeros((3, 5), jnp.bfloat16), "b": (jnp.zeros(7), None)}
    assert bytes_per_device(tree) == 30 + 28
    assert block_bytes(MODEL, 16, 4, num_shares=2) == PER_BLOCK // 2
    assert [show_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 29)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "5.0 MiB",
        "1.50 GiB",
    ]
    assert show_bytes(5 << 40) == "5120.00 GiB"


def test_the_bound_of_the_temporaries_is_above_what_compiled_programs_took_and_not_twice_as_much():
    # Compiled for an H200: largest temporary of the scanned step, and its logits; see docs/log.md.
    shape = find_shape("llama-3.1-8b")
    assert shape is not None
    config = dataclasses.replace(read_config(find_family(shape)[1], shape), dtype="bfloat16")
    for num_tokens, num_requests, taken in ((8192, 256, 741 + 125), (2048, 256, 90 + 125), (512, 16, 78 + 8)):
        bound = temporaries_bound(config, num_tokens, num_requests) / 2**20
        assert taken < bound < 2 * taken + 256
