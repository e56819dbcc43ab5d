"""The Triton version against the shared cases: in Triton's interpreter on a CPU, and compiled on a GPU."""

import functools
import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.kernels.launch import capability, poisoned_results
from jaxllm.kernels.paged_attention import reference
from jaxllm.kernels.paged_attention.mosaic_prefill import BLOCK_SIZES, HEAD_DIMS
from jaxllm.kernels.paged_attention.tuning import DecodeConfig, prefill_config

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

ON_GPU = jax.default_backend() == "gpu"
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def attend():
    """The Triton version, compiled, with results poisoned beforehand."""
    return compile_version("triton")


@functools.cache
def compile_version(name):
    version = importlib.import_module(f"jaxllm.kernels.paged_attention.{name}")

    @functools.partial(jax.jit, static_argnames=("scale", "softcap"))
    def run(query, kv_cache, layer, table, start, length, window, sinks, scale, softcap):
        with poisoned_results():
            return version.paged_attention(
                query, kv_cache, layer, table, start, length, scale=scale, window=window, softcap=softcap, sinks=sinks
            )

    def attend(inputs, scale, window=None, softcap=None, sinks=None):
        traced_window = None if window is None else jnp.int32(window)
        return run(*inputs, traced_window, sinks, scale=scale, softcap=softcap)

    return attend


def poison(inputs):
    """Puts NaN where make_attention_inputs has its huge number: in every slot that the batch must not read."""
    kv_cache = inputs.kv_cache.astype(np.float32)
    return inputs._replace(kv_cache=np.where(np.abs(kv_cache) > 1e4, np.nan, kv_cache).astype(inputs.kv_cache.dtype))


def assert_equal_where_real(out, expected, tolerance=TOLERANCE):
    real = ~np.isnan(expected)
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all(), "every row must be written, those of padding with anything finite"
    np.testing.assert_allclose(out[real], expected[real], rtol=tolerance, atol=tolerance)


def test_every_case_equals_dense_attention(attention_case, make_attention_inputs, dense_attention, attend):
    case = attention_case
    inputs = make_attention_inputs(case)
    out = attend(poison(inputs), **case.options)
    assert out.dtype == jnp.float32
    assert_equal_where_real(out, dense_attention(inputs, **case.options))


@pytest.mark.parametrize(
    "name", ["mixed_gqa7_of_128_with_a_window", "decode_of_skewed_lengths", "decode_of_64_with_sinks"]
)
def test_float16_is_accumulated_in_float32(name, case_named, make_attention_inputs, dense_attention, attend):
    case = case_named(name)
    inputs = make_attention_inputs(case, np.float16)
    out = attend(poison(inputs), **case.options)
    assert out.dtype == jnp.float16
    assert_equal_where_real(out, dense_attention(inputs, **case.options), 3e-3)


@pytest.mark.parametrize("window", [1, 7, 140, 1 << 30])
def test_any_window_and_a_traced_layer(window, case_named, make_attention_inputs, dense_attention, attend):
    for name in ("window_across_key_tiles", "decode_window_and_softcap"):
        inputs = make_attention_inputs(case_named(name))
        traced = poison(inputs)._replace(layer=jnp.int32(inputs.layer))
        assert_equal_where_real(attend(traced, 0.25, window), dense_attention(inputs, 0.25, window, None))


def test_a_decode_batch_equals_the_same_requests_as_a_ragged_batch(case_named, make_attention_inputs, attend):
    inputs = poison(make_attention_inputs(case_named("decode_with_padding_rows")))
    padding = np.ones((3, *inputs.query.shape[1:]), np.float32)
    decode = attend(inputs, 0.25)
    ragged = attend(inputs._replace(query=np.concatenate([inputs.query, padding])), 0.25)
    np.testing.assert_allclose(decode[:4], ragged[:4], rtol=TOLERANCE, atol=TOLERANCE)


def test_split_contexts_of_a_mixed_batch_launched_as_the_engine_does(
    case_named, make_attention_inputs, dense_attention
):
    # Poisoned results are operands updated in place, so the other tests' launches have no result of their own.
    version = importlib.import_module("jaxllm.kernels.paged_attention.triton")
    inputs = make_attention_inputs(case_named("gqa7_over_several_key_tiles"))
    out = np.asarray(jax.jit(functools.partial(version.paged_attention, scale=0.25))(*poison(inputs)), np.float64)
    expected = dense_attention(inputs, 0.25, None, None)
    real = ~np.isnan(expected)
    np.testing.assert_allclose(out[real], expected[real], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "few"),
    [
        ("decode_of_skewed_lengths", DecodeConfig(16, 1, 2, 32, 1024)),
        ("gqa7_over_several_key_tiles", DecodeConfig(32, 2, 4, 32, 256, 128)),
        ("decode_of_64_with_sinks", DecodeConfig(32, 4, 4, 32, 256)),
    ],
)
def test_contexts_in_many_chunks_are_added_up_in_every_layer(
    name, few, case_named, make_attention_inputs, dense_attention
):
    version = importlib.import_module("jaxllm.kernels.paged_attention.triton")
    case = case_named(name)
    inputs = make_attention_inputs(case)
    many = prefill_config(inputs.query.shape[2], inputs.query.dtype)

    @jax.jit
    def attend_twice(inputs):  # the arrivals of chunks are counted from zero again
        outs = []
        for _ in range(2):
            with poisoned_results():
                outs.append(version.attend(few, many, *inputs, **case.options))
        return outs

    first, second = attend_twice(poison(inputs))
    assert_equal_where_real(first, dense_attention(inputs, **case.options))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("version", ["triton", "mosaic"])
@pytest.mark.parametrize(
    "name",
    [
        "gqa7_over_several_key_tiles",
        "mixed_gqa7_of_128_with_a_window",
        "decode_of_skewed_lengths",
        "decode_of_64_with_sinks",
    ],
)
def test_a_plan_made_beforehand_gives_the_same_and_makes_lists_needless(
    name, version, case_named, make_attention_inputs, monkeypatch
):
    version = importlib.import_module(f"jaxllm.kernels.paged_attention.{version}")
    triton = importlib.import_module("jaxllm.kernels.paged_attention.triton")
    case = case_named(name)
    inputs = poison(make_attention_inputs(case, np.float16))
    group = inputs.query.shape[1] // inputs.kv_cache.shape[3]
    sizes = {"num_tokens": len(inputs.query), "table_width": inputs.block_table.shape[1], "group": group}
    plan = version.plan_attention(
        *(inputs.kv_cache, inputs.query_start, inputs.context_len),
        **sizes,
        dtype=inputs.query.dtype,
        window=case.window,
        has_sinks=case.has_sinks,
    )
    expected = version.paged_attention(*inputs, **case.options)
    monkeypatch.setattr(triton, "list_work", None)
    planned = version.paged_attention(*inputs, **case.options, plan=plan)
    np.testing.assert_array_equal(planned, expected)


def draw(rng, new, context, heads, head_dim, block_size):
    """Random float32 inputs on the device: scattered blocks, NaN wherever no request has a key."""
    (N, K), C, B = heads, block_size, len(new)
    per_request = [-(-length // C) for length in context]
    blocks = rng.permutation(np.arange(1, sum(per_request) + 5))
    table = np.zeros((B, max(per_request) + 2), np.int32)
    used = np.zeros((sum(per_request) + 5, C), bool)
    for b, length in enumerate(context):
        own, blocks = blocks[: per_request[b]], blocks[per_request[b] :]
        table[b, : len(own)] = own
        for m, block in enumerate(own):
            used[block, : length - m * C] = True
    keys = jax.random.split(jax.random.key(int(rng.integers(1 << 30))), 2)
    num_tokens = B if all(n == 1 for n in new) else (sum(new) // 8 + int(rng.integers(1, 5))) * 8
    query = jax.random.normal(keys[0], (num_tokens, N, head_dim))
    kv_cache = jax.random.normal(keys[1], (2, len(used), 2, K, C, head_dim))
    kv_cache = jnp.where(used[None, :, None, None, :, None], kv_cache, jnp.nan)
    start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return query, kv_cache, jnp.int32(1), table, start, np.asarray(context, np.int32)


# Tuning the reference's products would take most of the tests' time.
QUICKLY = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@functools.partial(jax.jit, static_argnames=("scale", "softcap"), compiler_options=QUICKLY)
def attend_plainly(query, kv_cache, layer, table, start, length, window=None, sinks=None, *, scale, softcap=None):
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    with jax.default_matmul_precision("highest"):
        return reference.paged_attention(query, jnp.nan_to_num(kv_cache), layer, table, start, length, **options)


def assert_within_the_references_own_rounding(attend, inputs, num_tokens, tolerance=2e-5, **options):
    """In float32 equal to the reference; in 16 bits at most 1.5 times as far from it as the reference itself is."""
    exact = np.asarray(attend_plainly(*inputs, **options), np.float64)[:num_tokens]
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        cast = (inputs[0].astype(dtype), inputs[1].astype(dtype), *inputs[2:])
        out = np.asarray(attend(cast, **options), np.float64)
        assert np.isfinite(out).all()
        out = out[:num_tokens]
        if dtype == jnp.float32:
            np.testing.assert_allclose(out, exact, rtol=tolerance, atol=2e-5)
            continue
        plain = np.asarray(attend_plainly(*cast, **options), np.float64)[:num_tokens]
        own_error = np.linalg.norm(plain - exact)
        assert np.linalg.norm(out - exact) <= 1.5 * own_error, (dtype, own_error / np.linalg.norm(exact))


SHAPES = [
    ((8, 8), 64, 16),
    ((8, 2), 128, 8),
    ((28, 4), 128, 16),
    ((16, 2), 80, 32),
    ((8, 1), 96, 64),
    ((4, 1), 256, 128),
]


@pytest.mark.parametrize("program", ["decode", "mixed", "mixed on Mosaic"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
def test_random_odd_sizes_equal_the_reference_within_its_own_rounding(shape, program):
    heads, head_dim, block_size = shape
    on_mosaic = program == "mixed on Mosaic"
    if on_mosaic and (capability() != 90 or head_dim not in HEAD_DIMS or block_size not in BLOCK_SIZES):
        pytest.skip("Mosaic does not take it")
    is_decode = program == "decode"
    rng = np.random.default_rng(head_dim * block_size + is_decode)
    turn = SHAPES.index(shape) + is_decode
    softcap, window = (30.0, jnp.int32(rng.integers(1, 700))) if turn % 2 == 0 else (None, None)
    sinks = None if on_mosaic or turn % 3 else jnp.asarray(rng.normal(size=heads[0]) * 3, jnp.float32)
    new = [1] * 37 if is_decode else rng.permutation([*rng.integers(1, 300, 6), 1, 1, 1, 2, 3, 5]).tolist()
    context = [n + int(before) for n, before in zip(new, rng.integers(0, 2500, len(new)), strict=True)]
    inputs = draw(rng, new, context, heads, head_dim, block_size)
    options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap, "sinks": sinks}
    attend = compile_version("mosaic" if on_mosaic else "triton")
    assert_within_the_references_own_rounding(attend, inputs, sum(new), **options)


@pytest.mark.parametrize("sinks", [None, (1.5, -2.0, 8.0, 0.0, 4.0, -9.0, 2.0, 11.0)], ids=["plain", "sinks"])
@pytest.mark.parametrize(
    ("new", "context"),
    [((1,) * 4, (131_072, 1, 0, 517)), ((1, 130, 3, 0), (131_072, 4_000, 90_000, 0)), ((40, 1), (131_072, 9))],
    ids=["decode", "mixed", "chunk"],
)
@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
def test_contexts_of_128k_beside_short_ones(new, context, sinks, attend):
    inputs = draw(np.random.default_rng(5), new, context, (8, 2), 128, 16)
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    assert_within_the_references_own_rounding(attend, inputs, sum(new), tolerance=5e-5, scale=0.09, sinks=sinks)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter multiplies the bits of bfloat16 numbers")
def test_bfloat16_cases_equal_dense_attention(attention_case, make_attention_inputs, dense_attention, attend):
    case = attention_case
    inputs = make_attention_inputs(case, ml_dtypes.bfloat16)
    out = attend(poison(inputs), **case.options)
    assert out.dtype == jnp.bfloat16
    assert_equal_where_real(out, dense_attention(inputs, **case.options), 3e-2)
