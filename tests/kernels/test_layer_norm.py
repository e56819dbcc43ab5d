import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.select import select

layer_norm = select("layer_norm", platform="cpu")


def by_hand(x, weight, bias, eps):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * weight + bias


@pytest.mark.parametrize("shape", [(5, 16), (3, 2, 8)])
def test_it_takes_the_mean_away_and_divides_by_the_deviation(shape):
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(3.0, 2.0, shape), rng.normal(size=shape[-1]), rng.normal(size=shape[-1])
    arrays = [jnp.asarray(array, jnp.float32) for array in (x, weight, bias)]
    np.testing.assert_allclose(layer_norm(*arrays, eps=0.1), by_hand(x, weight, bias, 0.1), atol=1e-5)
    np.testing.assert_allclose(layer_norm(*arrays[:2], eps=0.1), by_hand(x, weight, 0.0, 0.1), atol=1e-5)


def test_each_head_may_have_a_weight_of_its_own():
    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(4, 3, 8)), rng.normal(size=(3, 8))
    found = layer_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), eps=1e-5)
    np.testing.assert_allclose(found, by_hand(x, weight, 0.0, 1e-5), atol=1e-5)


def test_it_computes_in_float32_and_gives_the_type_of_its_input():
    x = jnp.asarray(np.random.default_rng(2).normal(100.0, 0.5, (4, 64)), jnp.bfloat16)
    found = layer_norm(x, jnp.ones(64, jnp.bfloat16), jnp.zeros(64, jnp.bfloat16), eps=1e-6)
    assert found.dtype == jnp.bfloat16
    expected = by_hand(np.asarray(x, np.float64), 1.0, 0.0, 1e-6)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=0.02)
