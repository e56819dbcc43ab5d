import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.rms_norm.reference import rms_norm


@pytest.mark.parametrize("shape", [(3, 48), (2, 5, 7), (0, 16)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_it_divides_by_the_root_mean_square_of_the_last_axis(shape, offset):
    rng = np.random.default_rng(1)
    x, weight = rng.normal(3, 2, shape).astype(np.float32), rng.normal(size=shape[-1:]).astype(np.float32)
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-3) * (offset + weight.astype(np.float64))
    np.testing.assert_allclose(rms_norm(x, weight, eps=1e-3, offset=offset), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_is_normalised_in_float32():
    x = jnp.asarray(np.random.default_rng(2).normal(100, 1, (2, 64)), jnp.bfloat16)
    out = rms_norm(x, jnp.ones(64, jnp.bfloat16), eps=1e-6)
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2**-8)


def test_a_zero_vector_stays_zero():
    assert not np.asarray(rms_norm(jnp.zeros((1, 8)), jnp.ones(8), eps=1e-6)).any()
