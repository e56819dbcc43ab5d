"""The Mosaic kernel for many new tokens: in Pallas's interpreter on a CPU, and compiled on a Hopper GPU."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm.kernels.e4m3.reference import E4M3
from jaxllm.kernels.launch import capability
from jaxllm.kernels.paged_attention import mosaic_prefill, reference
from jaxllm.kernels.paged_attention.mosaic_prefill import ALIGNMENT, MosaicConfig, choose_config, find_obstacle
from jaxllm.kernels.paged_attention.work_list import list_tiles

ON_GPU = jax.default_backend() == "gpu"
needs_hopper = pytest.mark.skipif(not ON_GPU or capability() != 90, reason="needs a Hopper GPU")
INTERPRET = None if ON_GPU else plgpu.InterpretGPUParams()

# new tokens, context, query and KV heads, head size, block size, window, softcap
SMALL = [
    ((40, 3, 21), (170, 131, 21), (8, 2), 128, 64, None, None),
    ((50, 37), (260, 337), (3, 1), 64, 16, 77, 5.0),
    ((1, 0, 9, 6), (150, 0, 9, 300), (8, 1), 64, 32, None, 30.0),
    ((70,), (200,), (2, 2), 128, 128, 1, None),
]


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_every_row_of_every_tile_is_written_and_right(sizes, monkeypatch):
    if ON_GPU and capability() != 90:
        pytest.skip("needs a Hopper GPU")
    new, context, heads, head_dim, block_size, window, softcap = sizes
    if not ON_GPU:
        monkeypatch.setattr(mosaic_prefill, "num_multiprocessors", lambda: 3)  # so that each takes several items
    inputs = draw(np.random.default_rng(3), new, context, heads, head_dim, block_size, jnp.float16)
    query, kv_cache, layer, table, start, length = inputs
    config = choose_config(head_dim)
    tile = config.tile_tokens(heads[0] // heads[1])
    tiles = list_tiles(start, length, window, query.shape[0], min_new=1, tile=tile, align=ALIGNMENT)
    scale = head_dim**-0.5
    out = mosaic_prefill.prefill(
        query, kv_cache, layer, table, tiles,
        context_len=length, scale=scale, window=window, softcap=softcap, config=config, interpret=INTERPRET,
    )  # fmt: skip
    if not ON_GPU:  # there, rows that nobody wrote would be NaN
        assert np.isfinite(np.asarray(out)).all()
    assert_close(out, attend_plainly(*exact(inputs), window, scale=scale, softcap=softcap), sum(new), jnp.float16)


# query and KV heads, head size, block size, window, softcap
MIXED = [
    ((8, 2), 64, 64, None, None),
    ((4, 2), 128, 32, 77, 30.0),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("sizes", MIXED, ids=str)
def test_few_new_tokens_between_many_are_added_to_the_same_array(sizes, monkeypatch):
    heads, head_dim, block_size, window, softcap = sizes
    version = importlib.import_module("jaxllm.kernels.paged_attention.mosaic")
    monkeypatch.setattr(mosaic_prefill, "num_multiprocessors", lambda: 3)
    monkeypatch.setattr(
        mosaic_prefill, "prefill", functools.partial(mosaic_prefill.prefill, interpret=plgpu.InterpretGPUParams())
    )
    rng = np.random.default_rng(MIXED.index(sizes))
    new = rng.permutation([37, 1, 1, 2, 6, 0, 17]).tolist()
    context = [n + int(before) if n else 0 for n, before in zip(new, rng.integers(0, 300, len(new)), strict=True)]
    inputs = draw(rng, new, context, heads, head_dim, block_size, jnp.float16)
    scale = head_dim**-0.5
    traced_window = None if window is None else jnp.int32(window)
    out = version.attend(choose_config(head_dim), *inputs, scale, window=traced_window, softcap=softcap)
    assert np.isfinite(np.asarray(out)).all()
    assert_close(out, attend_plainly(*exact(inputs), window, scale=scale, softcap=softcap), sum(new), jnp.float16)
    if window is None:
        return
    # A plan has the tiles of the kernel that takes it.
    query, kv_cache, _, table, start, length = inputs
    monkeypatch.setattr(version, "MIN_TOKENS", 0)
    sizes = {"num_tokens": len(query), "table_width": table.shape[1], "group": heads[0] // heads[1]}
    plan = version.plan_attention(kv_cache, start, length, **sizes, dtype=query.dtype, window=window)
    monkeypatch.setattr(version.triton, "list_work", None)
    planned = version.paged_attention(*inputs, scale=scale, window=traced_window, softcap=softcap, plan=plan)
    np.testing.assert_array_equal(planned, out)


# heads, head size, block size, window, softcap, type
LARGE = [
    ((32, 8), 128, 64, None, None, jnp.bfloat16),
    ((28, 4), 128, 16, None, 20.0, jnp.float16),
    ((8, 1), 64, 128, 300, None, jnp.bfloat16),
    ((16, 8), 128, 32, 77, 30.0, jnp.bfloat16),
    ((12, 12), 64, 16, None, None, jnp.float16),
    ((32, 2), 128, 128, 1, None, jnp.bfloat16),
]


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("sizes", LARGE, ids=str)
def test_ragged_batches_with_chunked_contexts_equal_the_reference(sizes):
    heads, head_dim, block_size, window, softcap, dtype = sizes
    version = importlib.import_module("jaxllm.kernels.paged_attention.mosaic")
    rng = np.random.default_rng(LARGE.index(sizes))
    new = rng.permutation([*rng.integers(1, 400, 6), 1, 1, 1, 2, 5, 6, 7, 8, 31, 33, 0, 128]).tolist()
    context = [n + int(before) if n else 0 for n, before in zip(new, rng.integers(0, 2500, len(new)), strict=True)]
    inputs = draw(rng, new, context, heads, head_dim, block_size, dtype)
    scale = head_dim**-0.5

    @jax.jit
    def run(query, kv_cache, layer, table, start, length, window):
        return version.paged_attention(
            query, kv_cache, layer, table, start, length, scale=scale, window=window, softcap=softcap
        )

    expected = attend_plainly(*exact(inputs), window, scale=scale, softcap=softcap)
    for _ in range(3):  # a race shows in one run and not in the next
        out = run(*inputs, None if window is None else jnp.int32(window))
        assert out.dtype == dtype
        assert_close(out, expected, sum(new), dtype)


@pytest.mark.gpu
@needs_hopper
def test_in_a_scan_over_the_layers_equals_layer_by_layer():
    version = importlib.import_module("jaxllm.kernels.paged_attention.mosaic")
    new, context = (200, 1, 60), (1000, 700, 60)
    query, kv_cache, _, table, start, length = draw(
        np.random.default_rng(1), new, context, (8, 2), 128, 16, jnp.bfloat16
    )
    attend = functools.partial(version.paged_attention, scale=0.1)

    @jax.jit
    def scanned(query, kv_cache):
        def layer(query, xs):
            return attend(query, kv_cache, xs[0], table, start, length, window=xs[1]), None

        return jax.lax.scan(layer, query, (jnp.arange(2), jnp.array([1 << 30, 50])))[0]

    @jax.jit
    def unrolled(query, kv_cache):
        query = attend(query, kv_cache, 0, table, start, length)
        return attend(query, kv_cache, 1, table, start, length, window=50)

    kv_cache = jnp.stack([kv_cache[1] * 0.7, kv_cache[1]])  # layer 0 has no keys at all
    one, other = (np.asarray(run(query, kv_cache)[: sum(new)], np.float32) for run in (scanned, unrolled))
    np.testing.assert_allclose(one, other, atol=2e-2)


@pytest.mark.interpreter
def test_batches_that_mosaic_does_not_take_go_to_triton_with_one_line_each(monkeypatch, caplog):
    version = importlib.import_module("jaxllm.kernels.paged_attention.mosaic")
    monkeypatch.setattr(version.triton, "paged_attention", lambda *_, **__: "triton")
    version._log_once.cache_clear()

    def attend(num_tokens, head_dim, num_requests=2, dtype=jnp.bfloat16, cache_dtype=jnp.bfloat16, sinks=None):
        query = jnp.zeros((num_tokens, 4, head_dim), dtype)
        kv_cache = jnp.zeros((1, 2, 2, 2, 16, head_dim), cache_dtype)
        table, length = jnp.zeros((num_requests, 1), jnp.int32), jnp.zeros(num_requests, jnp.int32)
        start = jnp.arange(num_requests + 1)
        return version.paged_attention(query, kv_cache, 0, table, start, length, scale=1.0, sinks=sinks)

    assert attend(512, 80) == attend(1024, 80) == attend(256, 80, num_requests=256) == attend(128, 128) == "triton"
    assert attend(512, 128, cache_dtype=E4M3) == attend(1024, 128, cache_dtype=E4M3) == "triton"
    assert attend(512, 128, dtype=jnp.float32, cache_dtype=jnp.float32) == "triton"
    sinks = jnp.zeros(4)
    assert attend(512, 128, sinks=sinks) == attend(1024, 128, sinks=sinks) == attend(128, 128, sinks=sinks) == "triton"
    told = "paged_attention: mosaic leaves many new tokens to triton: "
    assert [record.getMessage() for record in caplog.records] == [
        told + "the head size is 80, not one of 64, 128",
        told + "the cache is e4m3, the queries are bfloat16",
        told + "it multiplies bfloat16 and float16, not float32",
        told + "it knows no attention sinks",
    ]


def test_sizes_and_types_that_the_kernel_is_not_made_for_are_named():
    def refuse(**other):
        sizes: dict[str, Any] = {"num_tokens": 512, "head_dim": 128, "block_size": 16}
        return find_obstacle(**sizes | {"dtype": jnp.bfloat16, "cache_dtype": jnp.bfloat16} | other)

    assert refuse() is None
    assert refuse(head_dim=80) == "the head size is 80, not one of 64, 128"
    assert refuse(block_size=8) == "the block size is 8, not one of 16, 32, 64, 128"
    assert refuse(num_tokens=300) == "the batch's 300 tokens are no multiple of 8"
    assert "float32" in str(refuse(dtype=jnp.float32))
    assert refuse(cache_dtype=E4M3) == "the cache is e4m3, the queries are bfloat16"
    assert "the cache is float16" in str(refuse(cache_dtype=jnp.float16))


@pytest.mark.parametrize(("group", "tokens"), [(1, 128), (2, 64), (3, 128), (4, 32), (7, 128), (8, 16), (12, 32)])
def test_the_heads_of_a_tile_divide_the_group_and_fill_the_rows(group, tokens):
    heads = mosaic_prefill.heads_at_once(group)
    assert group % heads == 0
    assert MosaicConfig().tile_tokens(group) == tokens
    assert tokens * heads == 2 * mosaic_prefill.ROWS


def draw(rng, new, context, heads, head_dim, block_size, dtype):
    """Random inputs: scattered blocks, NaN wherever no request has a key, padding up to a multiple of ALIGNMENT."""
    (N, K), C, B = heads, block_size, len(new)
    per_request = [-(-length // C) for length in context]
    blocks = rng.permutation(np.arange(1, sum(per_request) + 5))
    table = np.zeros((B, max(per_request) + 1), np.int32)
    used = np.zeros((sum(per_request) + 5, C), bool)
    for b, length in enumerate(context):
        own, blocks = blocks[: per_request[b]], blocks[per_request[b] :]
        table[b, : len(own)] = own
        for m, block in enumerate(own):
            used[block, : length - m * C] = True
    num_tokens = -(-max(sum(new) + 3, 256 if ON_GPU else 0) // ALIGNMENT) * ALIGNMENT
    keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), 2)
    query = jax.random.normal(keys[0], (num_tokens, N, head_dim)).astype(dtype)
    kv_cache = jax.random.normal(keys[1], (2, len(used), 2, K, C, head_dim))
    is_key = used[None, :, None, None, :, None] & (np.arange(2) == 1)[:, None, None, None, None, None]
    kv_cache = jnp.where(is_key, kv_cache, jnp.nan).astype(dtype)
    start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return query, kv_cache, jnp.int32(1), jnp.asarray(table), jnp.asarray(start), jnp.asarray(context, jnp.int32)


def exact(inputs):
    query, kv_cache, *rest = inputs
    return query.astype(jnp.float32), jnp.nan_to_num(kv_cache.astype(jnp.float32)), *rest


# Tuning the reference's products would take most of the tests' time.
QUICKLY = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False} if ON_GPU else None


@functools.partial(jax.jit, static_argnames=("scale", "softcap"), compiler_options=QUICKLY)
def attend_plainly(query, kv_cache, layer, table, start, length, window, scale, softcap):
    with jax.default_matmul_precision("highest"):
        return reference.paged_attention(
            query, kv_cache, layer, table, start, length, scale=scale, window=window, softcap=softcap
        )


def assert_close(out, expected, num_tokens, dtype):
    """Within the rounding of weights and outcome to the type: of all together, and of each head of each token."""
    whole, each = (4e-3, 2e-2) if dtype == jnp.bfloat16 else (6e-4, 4e-3)
    out, expected = (np.asarray(array[:num_tokens], np.float64) for array in (out, expected))
    assert np.linalg.norm(out - expected) <= whole * np.linalg.norm(expected)
    error = np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert error.max() <= each, np.unravel_index(error.argmax(), error.shape)
