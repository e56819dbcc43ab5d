import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.kernels.kv_write.reference import kv_write

L, P, K, C, H = 3, 5, 2, 8, 4
write = jax.jit(kv_write)


@pytest.mark.parametrize("layer", [0, 2, jnp.int32(1)], ids=["first", "last", "traced"])
def test_each_token_lands_in_its_slot_and_nothing_else_changes(layer):
    rng = np.random.default_rng(0)
    cache = rng.normal(size=(L, P, 2, K, C, H)).astype(np.float32)
    key, value = rng.normal(size=(2, 5, K, H)).astype(np.float32)
    block, offset = np.array([4, 1, 1, 3, 4], np.int32), np.array([0, 7, 0, 3, 7], np.int32)
    expected = cache.copy()
    for t in range(5):
        expected[int(layer), block[t], 0, :, offset[t]] = key[t]
        expected[int(layer), block[t], 1, :, offset[t]] = value[t]
    np.testing.assert_array_equal(write(cache, layer, key, value, block, offset), expected)


def test_padding_tokens_may_share_a_slot_of_block_0():
    cache = np.zeros((L, P, 2, K, C, H), np.float32)
    tokens = np.ones((4, K, H), np.float32)
    block, offset = np.array([2, 0, 0, 0], np.int32), np.zeros(4, np.int32)
    out = np.array(write(jnp.asarray(cache), 1, tokens, -tokens, block, offset))
    assert (out[1, 2, 0, :, 0] == 1).all()
    assert (out[1, 2, 1, :, 0] == -1).all()
    out[1, 2, :, :, 0] = 0
    assert not out[:, 1:].any()


def test_values_are_stored_in_the_type_of_the_cache():
    cache = jnp.zeros((1, 2, 2, 1, C, H), jnp.bfloat16)
    key = np.full((1, 1, H), 1.00001, np.float32)
    out = write(cache, 0, key, key, np.array([1]), np.array([2]))
    assert out.dtype == jnp.bfloat16
    assert (out[0, 1, :, :, 2] == 1).all()


def test_an_8_bit_cache_stores_the_nearest_number_and_saturates():
    cache = jnp.zeros((1, 2, 2, 1, C, H), jnp.uint8)
    key = np.array([[[1.0625, 1.0626, -0.003, 0.0]]], np.float32)  # a tie between 1 and 1.125, a subnormal
    value = np.array([[[447.0, 449.0, -1e9, 2**-11]]], np.float32)
    out = np.asarray(write(cache, 0, key, value, np.array([1]), np.array([2])))
    out = out.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert out[0, 1, 0, 0, 2].tolist() == [1.0, 1.125, -0.00390625, 0.0]
    assert out[0, 1, 1, 0, 2].tolist() == [448.0, 448.0, -448.0, 0.0]


def test_an_8_bit_cache_is_written_in_place():
    cache = jax.ShapeDtypeStruct((L, 1000, 2, K, C, H), jnp.uint8)
    token, slot = jax.ShapeDtypeStruct((4, K, H), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    compiled = jax.jit(kv_write, donate_argnums=0).lower(cache, 1, token, token, slot, slot).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache.size / 10
