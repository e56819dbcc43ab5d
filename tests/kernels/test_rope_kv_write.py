import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.e4m3.reference import widen
from jaxllm.kernels.rope_kv_write.reference import rope_kv_write

T, K, G, H, R, L, P, C = 5, 2, 3, 8, 3, 2, 4, 4


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_head_of_the_projection_is_biased_normed_turned_and_put_in_its_place(has_bias, has_norms):
    rng = np.random.default_rng(0)
    cache, qkv = rng.normal(size=(L, P, 2, K, C, H)), rng.normal(size=(T, K, G + 2, H))
    angle, bias, q_norm, k_norm = (rng.normal(size=shape) for shape in ((T, R), (K, G + 2, H), H, H))
    block, offset = np.array([3, 3, 1, 2, 2]), np.array([0, 3, 1, 2, 0])

    def normed(x, weight):
        return x / np.sqrt((x**2).mean() + 1e-5) * (1 + weight) if has_norms else x

    def turned(x, t):
        pairs = (x[:R] + 1j * x[R : 2 * R]) * np.exp(1j * angle[t])
        return np.concatenate([pairs.real, pairs.imag, x[2 * R :]])

    query, expected = np.zeros((T, K * G, H)), cache.copy()
    for t in range(T):
        for k in range(K):
            rows = qkv[t, k] + (bias[k] if has_bias else 0)
            for g in range(G):
                query[t, k * G + g] = turned(normed(rows[g], q_norm), t)
            expected[1, block[t], 0, k, offset[t]] = turned(normed(rows[G], k_norm), t)
            expected[1, block[t], 1, k, offset[t]] = rows[G + 1]

    options = {"bias": bias if has_bias else None, "eps": 1e-5, "norm_offset": 1.0}
    options |= {"q_norm": q_norm, "k_norm": k_norm} if has_norms else {}
    options = {name: jnp.float32(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    arrays = [jnp.float32(x) for x in (cache, qkv, np.cos(angle), np.sin(angle))]

    def run(cache, qkv, cos, sin):
        return rope_kv_write(cache, jnp.int32(1), qkv, cos, sin, jnp.asarray(block), jnp.asarray(offset), **options)

    found_query, found = jax.jit(run)(*arrays)
    np.testing.assert_allclose(found_query, query, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_with_a_scale_the_products_with_what_is_stored_are_those_without():
    rng = np.random.default_rng(1)
    cache = jnp.zeros((L, P, 2, K, C, H), jnp.float32)
    qkv = jnp.float32(rng.normal(size=(T, K, G + 2, H)))
    angle = rng.normal(size=(T, R))
    slots = (jnp.asarray([1, 1, 2, 3, 3]), jnp.asarray([0, 1, 2, 3, 0]))
    arguments = (cache, 1, qkv, jnp.float32(np.cos(angle)), jnp.float32(np.sin(angle)), *slots)
    query, plain = rope_kv_write(*arguments)
    scaled_query, scaled = rope_kv_write(*arguments, kv_scale=jnp.float32([0.25, 8.0]))
    np.testing.assert_allclose(scaled_query, query * 0.25, rtol=1e-6)
    np.testing.assert_allclose(scaled[:, :, 0] * 0.25, plain[:, :, 0], rtol=1e-6)
    np.testing.assert_allclose(scaled[:, :, 1] * 8.0, plain[:, :, 1], rtol=1e-6)
    tiny = jnp.float32([1e-3, 1e-3])
    _, saturated = rope_kv_write(jnp.zeros(cache.shape, jnp.uint8), *arguments[1:], kv_scale=tiny)
    assert float(jnp.abs(widen(saturated, jnp.float32)).max()) == 448.0
