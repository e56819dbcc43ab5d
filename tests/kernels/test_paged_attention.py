import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.kernels.paged_attention.reference import paged_attention

TOLERANCE = 2e-5
compiled = jax.jit(paged_attention, static_argnames=("scale", "window", "softcap"))
compiled_traced = jax.jit(
    lambda q, kv, layer, table, start, length, window: paged_attention(
        q, kv, layer, table, start, length, scale=0.25, window=window
    )
)


def assert_equal_where_real(out, expected, tolerance=TOLERANCE):
    real = ~np.isnan(expected)
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all(), "rows of padding must hold finite numbers"
    np.testing.assert_allclose(out[real], expected[real], rtol=tolerance, atol=tolerance)


def test_every_case_equals_dense_attention(attention_case, make_attention_inputs, dense_attention):
    case = attention_case
    inputs = make_attention_inputs(case)
    out = compiled(*inputs, **case.options)
    assert out.dtype == jnp.float32
    assert_equal_where_real(out, dense_attention(inputs, **case.options))


def test_the_cases_cover_all_sizes_and_options_in_both_programs(attention_cases):
    for is_decode in (True, False):
        cases = [case for case in attention_cases if (set(case.new) == {1} and len(case.new) > 1) == is_decode]
        assert {1, 4, 7, 8} <= {case.heads[0] // case.heads[1] for case in cases}
        assert {64, 80, 96, 128, 256} <= {case.head_dim for case in cases}
        assert {8, 16, 32, 64, 128} <= {case.block_size for case in cases}
        assert {0, 1} <= {length for case in cases for length in (*case.context, *[0] * case.num_padding)}
        for option in ("window", "softcap", "sinks", "scale"):
            assert any(getattr(case, option) is not None for case in cases), option


def test_sinks_take_weight_as_another_key_without_value_would(case_named, make_attention_inputs):
    inputs = make_attention_inputs(case_named("decode_of_64_with_sinks"))
    plain = compiled(*inputs, scale=0.125)
    none = compiled(*inputs, scale=0.125, sinks=np.full(8, -np.inf, np.float32))
    np.testing.assert_array_equal(none, plain)
    # Of one key, the only other logit is the sink's: equal ones halve the weight.
    query = np.zeros_like(inputs.query)
    halved = compiled(query, *inputs[1:], scale=0.125, sinks=jnp.zeros(8, jnp.bfloat16))
    whole = compiled(query, *inputs[1:], scale=0.125)
    np.testing.assert_allclose(halved[0], whole[0] / 2, rtol=1e-6)


@pytest.mark.parametrize("window", [1, 7, 140, 1 << 30])
def test_a_traced_window_and_layer_give_the_same(window, make_attention_inputs, dense_attention, case_named):
    case = case_named("window_across_key_tiles")
    inputs = make_attention_inputs(case)
    arrays = (*inputs[:2], jnp.int32(inputs.layer), *inputs[3:])
    out = compiled_traced(*arrays, jnp.int32(window))
    assert_equal_where_real(out, dense_attention(inputs, 0.25, window, None))


def test_a_decode_batch_takes_a_traced_window(make_attention_inputs, dense_attention, case_named):
    inputs = make_attention_inputs(case_named("decode_window_and_softcap"))
    for window in (3, 1 << 30):
        out = compiled_traced(*inputs, jnp.int32(window))
        assert_equal_where_real(out, dense_attention(inputs, 0.25, window, None))


def test_padding_rows_do_not_make_the_walk_begin_before_the_window(make_attention_inputs, dense_attention, case_named):
    inputs = make_attention_inputs(case_named("decode_window_and_softcap"))
    context_len = np.array([600, 0, 600, 0], np.int32)
    inputs = inputs._replace(block_table=inputs.block_table[[2] * 4], context_len=context_len)
    expected = dense_attention(inputs, 0.25, 7, None)
    behind = inputs.block_table[0, :64]  # two key tiles of 256, all of it out of the window
    inputs.kv_cache[:, behind] = np.nan  # where it is read, a weight of 0 x NaN gives NaN
    assert_equal_where_real(compiled_traced(*inputs, jnp.int32(7)), expected)


def test_a_decode_batch_equals_the_same_requests_as_a_ragged_batch(make_attention_inputs, case_named):
    inputs = make_attention_inputs(case_named("decode_with_padding_rows"))
    scale, padding = 0.25, np.ones((3, *inputs.query.shape[1:]), np.float32)
    decode = compiled(*inputs, scale=scale)
    query = np.concatenate([inputs.query, padding])  # T != B: the mixed program
    ragged = compiled(query, *inputs[1:], scale=scale)
    np.testing.assert_allclose(decode[:4], ragged[:4], rtol=TOLERANCE, atol=TOLERANCE)


def test_bfloat16_inputs_are_accumulated_in_float32(make_attention_inputs, dense_attention, case_named):
    inputs = make_attention_inputs(case_named("gqa7_over_several_key_tiles"), ml_dtypes.bfloat16)
    out = compiled(*inputs, scale=0.25)
    assert out.dtype == jnp.bfloat16
    # A bfloat16 sum over 300 keys would be off by about 0.1.
    assert_equal_where_real(out, dense_attention(inputs, 0.25, None, None), 2e-2)


def test_the_result_depends_neither_on_the_block_size_nor_on_the_neighbours(make_attention_inputs, case_named):
    inputs = make_attention_inputs(case_named("gqa4_chunks_mid_context_and_empty_rows"))
    whole = np.asarray(compiled(*inputs, scale=0.25))
    for b in (0, 3):  # one prefill chunk and one single token, alone in a batch with blocks of another size
        start, stop, length = *inputs.query_start[b : b + 2], inputs.context_len[b]
        kv_cache, block_table = reblock(inputs, b, block_size=8)
        query = np.zeros((8, *inputs.query.shape[1:]), np.float32)
        query[: stop - start] = inputs.query[start:stop]
        alone = compiled(
            query, kv_cache, 0, block_table, np.array([0, stop - start], np.int32), np.array([length]), scale=0.25
        )
        np.testing.assert_allclose(alone[: stop - start], whole[start:stop], rtol=2e-6, atol=2e-6)


def reblock(inputs, b, block_size):
    """Copies the KV of one request into a cache of its own with another block size."""
    C, length = inputs.kv_cache.shape[4], inputs.context_len[b]
    flat = np.stack(
        [inputs.kv_cache[inputs.layer, inputs.block_table[b, p // C], :, :, p % C] for p in range(length)], axis=2
    )
    width = 8
    kv_cache = np.full((1, width + 1, *flat.shape[:2], block_size, flat.shape[-1]), 1e30, np.float32)
    for p in range(length):
        kv_cache[0, 1 + p // block_size, :, :, p % block_size] = flat[:, :, p]
    return kv_cache, np.arange(1, width + 1, dtype=np.int32)[None] * (np.arange(width) * block_size < length)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_ragged_batch_equals_dense_attention(data, make_attention_inputs, dense_attention, case_named):
    # One shape, so that it is compiled once; what varies is how its 40 tokens are dealt to 4 requests.
    inputs = make_attention_inputs(case_named("room_for_any_batch"))
    new = [data.draw(st.integers(0, 10), label="new") for _ in range(4)]
    context = [n and n + data.draw(st.integers(0, 150), label="before") for n in new]
    window = data.draw(st.sampled_from([1, 2, 16, 33, 1 << 30]), label="window")
    inputs = inputs._replace(
        query_start=np.concatenate([[0], np.cumsum(new)]).astype(np.int32), context_len=np.asarray(context, np.int32)
    )
    expected = dense_attention(inputs, 0.25, window, None)
    assert_equal_where_real(compiled_traced(*inputs, jnp.int32(window)), expected)


@pytest.mark.parametrize("name", ["mixed_mha_of_64", "window_of_one", "decode_with_padding_rows"])
def test_a_cache_of_8_bit_numbers_is_read_as_numbers_of_the_querys_type(
    name, case_named, make_attention_inputs, dense_attention
):
    case = case_named(name)
    exact = make_attention_inputs(case)
    stored = exact._replace(kv_cache=np.clip(exact.kv_cache, -448, 448).astype(ml_dtypes.float8_e4m3fn))
    options = case.options
    in_bytes = stored._replace(kv_cache=stored.kv_cache.view(np.uint8))
    out = compiled(*in_bytes, **options)
    assert out.dtype == jnp.float32
    expected = dense_attention(stored, **options)
    assert_equal_where_real(out, expected)
    wanted, real = dense_attention(exact, **options), ~np.isnan(expected)
    error = np.linalg.norm((expected - wanted)[real]) / np.linalg.norm(wanted[real])
    # Three bits of mantissa are off by 2^-4 at most, by 0.026 in the mean square; keys and values are both rounded.
    assert 0 < error < 0.05


def test_a_cache_may_be_wider_or_narrower_than_the_queries(case_named, make_attention_inputs, dense_attention):
    inputs = make_attention_inputs(case_named("decode_of_skewed_lengths"), ml_dtypes.bfloat16)
    expected = dense_attention(inputs, 0.25, None, None)
    for query, cache in ((np.float32, ml_dtypes.bfloat16), (ml_dtypes.bfloat16, np.float32)):
        mixed = inputs._replace(query=inputs.query.astype(query), kv_cache=inputs.kv_cache.astype(cache))
        out = compiled(*mixed, scale=0.25)
        assert out.dtype == query
        assert_equal_where_real(out, expected, TOLERANCE if query == np.float32 else 3e-2)
