"""The Triton kernels over a cache of 8-bit numbers: in Triton's interpreter on a CPU, and compiled on a GPU."""

import functools
import importlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.kernels.e4m3.reference import E4M3, narrow, widen
from jaxllm.kernels.launch import poisoned_results
from jaxllm.kernels.paged_attention import reference
from jaxllm.kernels.rope_kv_write.reference import rope_kv_write

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

ON_GPU = jax.default_backend() == "gpu"
L, P, C = 3, 9, 8
# Tuning the reference's products would take most of the tests' time.
QUICKLY = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
SHAPES = [((8, 2), 128, 16), ((28, 4), 128, 64), ((8, 8), 64, 16), ((4, 1), 256, 128)]


def triton_version(operation):
    return getattr(importlib.import_module(f"jaxllm.kernels.{operation}.triton"), operation)


@functools.partial(jax.jit, static_argnames=("scale", "softcap"))
def attend(query, kv_cache, layer, table, start, length, window=None, sinks=None, *, scale, softcap=None):
    with poisoned_results():
        return triton_version("paged_attention")(
            query, kv_cache, layer, table, start, length, scale=scale, window=window, softcap=softcap, sinks=sinks
        )


def in_8_bits(inputs):
    """The same inputs over a cache of bytes, with NaN in every slot that the batch must not read."""
    kv_cache = np.where(np.abs(inputs.kv_cache) > 1e4, np.nan, inputs.kv_cache)
    return inputs._replace(kv_cache=kv_cache.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def as_floats(inputs):
    """What the bytes of the cache stand for."""
    return inputs._replace(kv_cache=inputs.kv_cache.view(ml_dtypes.float8_e4m3fn))


def assert_equal_where_real(out, expected, tolerance):
    real = ~np.isnan(expected)
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all(), "every row must be written, those of padding with anything finite"
    np.testing.assert_allclose(out[real], expected[real], rtol=tolerance, atol=tolerance)


def test_every_case_equals_dense_attention_over_what_is_stored(attention_case, make_attention_inputs, dense_attention):
    case = attention_case
    inputs = in_8_bits(make_attention_inputs(case))
    expected = dense_attention(as_floats(inputs), **case.options)
    out = attend(*inputs, **case.options)
    assert out.dtype == jnp.float32
    assert_equal_where_real(out, expected, 2e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "name", ["mixed_gqa7_of_128_with_a_window", "decode_of_skewed_lengths", "decode_of_64_with_sinks"]
)
def test_queries_of_16_bits_are_multiplied_in_float16(name, dtype, case_named, make_attention_inputs, dense_attention):
    if dtype == jnp.bfloat16 and not ON_GPU:
        pytest.skip("the interpreter multiplies the bits of bfloat16 numbers")
    case = case_named(name)
    inputs = in_8_bits(make_attention_inputs(case))
    inputs = inputs._replace(query=np.asarray(jnp.asarray(inputs.query, dtype)))
    options = case.options | {"scale": 0.125}
    out = attend(*inputs, **options)
    assert out.dtype == dtype
    tolerance = 3e-3 if dtype == jnp.float16 else 1e-2
    assert_equal_where_real(out, dense_attention(as_floats(inputs), **options), tolerance)


def every_kind(shape, dtype=np.float32):
    """Numbers of all magnitudes, ties between neighbours, and what is beyond the range."""
    rng = np.random.default_rng(0)
    exact = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = (exact[1:] + exact[:-1]) / 2
    special = np.concatenate([exact, ties, [448.1, 464.0, 500.0, 1e6, 3e-4, 1e-3, 9.8e-4]])
    drawn = rng.normal(size=shape) * 10 ** rng.uniform(-4, 3, size=shape)
    flat = drawn.ravel()
    flat[: 2 * len(special)] = np.concatenate([special, -special])
    return jnp.asarray(rng.permutation(flat).reshape(shape), dtype)


def slots(num_tokens, num_padding):
    rng = np.random.default_rng(1)
    slot = np.concatenate([C + rng.permutation((P - 1) * C)[:num_tokens], np.zeros(num_padding, int)])
    return jnp.asarray(slot // C, jnp.int32), jnp.asarray(slot % C, jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("K", "H"), [(2, 128), (3, 80)])
def test_kv_write_stores_the_nearest_8_bit_numbers(K, H, dtype):
    if dtype == jnp.bfloat16 and not ON_GPU:
        pytest.skip("the interpreter has no bfloat16")
    block, offset = slots(21, 2)
    cache = jnp.zeros((L, P, 2, K, C, H), E4M3)
    key, value = every_kind((23, K, H), dtype), every_kind((23, K, H), dtype)[::-1]
    out = jax.jit(triton_version("kv_write"))(cache, jnp.int32(1), key, value, block, offset)
    expected = np.zeros(cache.shape, np.uint8)
    for t in range(21):
        expected[1, block[t], 0, :, offset[t]], expected[1, block[t], 1, :, offset[t]] = (
            nearest(key[t]),
            nearest(value[t]),
        )
    np.testing.assert_array_equal(bits(out[:, 1:]), bits(expected[:, 1:]))


def nearest(x):
    """The bits of the nearest 8-bit numbers, by another implementation."""
    return np.clip(np.asarray(x, np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def bits(cache):
    """As bytes, without the sign of zero."""
    code = np.asarray(cache)
    return np.where(code == 0x80, 0, code)


@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize(("K", "G", "H", "R"), [(2, 4, 128, 64), (2, 1, 96, 24)])
def test_rope_kv_write_stores_what_the_reference_stores(K, G, H, R, has_scale):
    rng = np.random.default_rng(H)
    block, offset = slots(21, 2)
    cache = jnp.zeros((L, P, 2, K, C, H), E4M3)
    qkv = jnp.asarray(rng.normal(size=(23, K, G + 2, H)) * 5, jnp.float32)
    angle = rng.uniform(0, 100, size=(23, R))
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    kv_scale = jnp.asarray([0.013, 0.5], jnp.float32) if has_scale else None
    arguments = (cache, jnp.int32(2), qkv, cos, sin, block, offset)

    def run(*arguments):
        with poisoned_results():
            return triton_version("rope_kv_write")(*arguments, kv_scale=kv_scale)

    expected_query, expected_cache = rope_kv_write(*arguments, kv_scale=kv_scale)
    query, out = jax.jit(run)(*arguments)
    np.testing.assert_allclose(query, expected_query, rtol=1e-5, atol=1e-5)
    found, expected = (np.asarray(widen(x[:, 1:], jnp.float32)) for x in (out, expected_cache))
    # A last bit of float32 may turn a tie, and XLA may go by way of float16: then it is the next number.
    assert (found != expected).mean() < 1e-2
    np.testing.assert_allclose(found, expected, rtol=1 / 8, atol=2**-9)
    if has_scale:
        assert (np.abs(found) == 448).any(), "with this scale keys saturate"


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("is_decode", [True, False], ids=["decode", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_odd_sizes_equal_the_reference_over_what_is_stored(shape, is_decode):
    (N, K), H, block_size = shape
    rng = np.random.default_rng(H * block_size + is_decode)
    new = [1] * 37 if is_decode else rng.permutation([*rng.integers(1, 300, 6), 1, 1, 2, 5]).tolist()
    context = np.asarray([n + int(rng.integers(0, 2500)) for n in new], np.int32)
    per_request = -(-context // block_size)
    table = np.zeros((len(new), per_request.max() + 2), np.int32)
    blocks = rng.permutation(np.arange(1, per_request.sum() + 1))
    for b, count in enumerate(per_request):
        table[b, :count], blocks = blocks[:count], blocks[count:]
    keys = jax.random.split(jax.random.key(H), 2)
    query = jax.random.normal(keys[0], (sum(new), N, H))
    kv_cache = narrow(jax.random.normal(keys[1], (2, per_request.sum() + 1, 2, K, block_size, H)), E4M3)
    start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    rest = (kv_cache, jnp.int32(1), table, start, context)
    sinks = jnp.asarray(rng.normal(size=N) * 3, jnp.float32) if SHAPES.index(shape) % 2 == is_decode else None
    assert_within_the_references_own_rounding(query, rest, sinks)


def assert_within_the_references_own_rounding(query, rest, sinks):
    """In float32 equal to the reference; in 16 bits at most 1.5 times as far from it as the reference itself is."""
    scale = query.shape[2] ** -0.5

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def plain(query, *rest):
        with jax.default_matmul_precision("highest"):
            return reference.paged_attention(query, *rest, scale=scale, sinks=sinks)

    exact = np.asarray(plain(query, *rest), np.float64)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        cast = query.astype(dtype)
        out = np.asarray(attend(cast, *rest, None, sinks, scale=scale), np.float64)
        own_error = np.linalg.norm(np.asarray(plain(cast, *rest), np.float64) - exact)
        limit = 2e-5 * np.linalg.norm(exact) if dtype == jnp.float32 else 1.5 * own_error
        assert np.linalg.norm(out - exact) <= limit, (dtype, limit / np.linalg.norm(exact))


@pytest.mark.skipif(not ON_GPU, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("new", [(1, 1), (1, 40)], ids=["decode", "mixed"])
def test_a_context_of_128k_of_8_bit_numbers(new):
    context, block_size, K, H = np.asarray([131_072, 300], np.int32), 16, 2, 128
    num_blocks = -(-context // block_size)
    table = np.zeros((2, num_blocks.max()), np.int32)
    blocks = np.random.default_rng(1).permutation(np.arange(1, num_blocks.sum() + 1))
    table[0], table[1, : num_blocks[1]] = blocks[: num_blocks[0]], blocks[num_blocks[0] :]
    keys = jax.random.split(jax.random.key(1), 2)
    query = jax.random.normal(keys[0], (sum(new), 8, H))
    kv_cache = narrow(jax.random.normal(keys[1], (1, len(blocks) + 1, 2, K, block_size, H)), E4M3)
    start = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    assert_within_the_references_own_rounding(query, (kv_cache, jnp.int32(0), table, start, context), None)
