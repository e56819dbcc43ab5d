import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.rope.reference import apply_rope

turn = jax.jit(apply_rope)


@pytest.mark.parametrize(("head_dim", "turned"), [(8, 4), (10, 3), (6, 0)])
def test_features_i_and_i_plus_r_turn_as_a_complex_number(head_dim, turned):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 3, head_dim)).astype(np.float32)
    angle = rng.uniform(0, 100, size=(5, turned))
    out = turn(x, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32))
    pairs = (x[..., :turned] + 1j * x[..., turned : 2 * turned]) * np.exp(1j * angle)[:, None]
    expected = np.concatenate([pairs.real, pairs.imag, x[..., 2 * turned :]], axis=-1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_scores_depend_on_the_distance_of_two_positions_only():
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(2, 1, 16)).astype(np.float32)
    freq = 100.0 ** -(np.arange(8) / 8)

    def at(x, position):
        angle = np.array([position * freq])
        return np.asarray(turn(x[None], jnp.cos(angle), jnp.sin(angle)))[0, 0]

    near, far = at(q, 9) @ at(k, 4), at(q, 105) @ at(k, 100)
    np.testing.assert_allclose(near, far, rtol=1e-4)
    assert abs(near - at(q, 9) @ at(k, 5)) > 1e-2


def test_bfloat16_is_turned_in_float32_and_given_back_as_it_came():
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 1, 8)), jnp.bfloat16)
    cos, sin = jnp.full((2, 4), 0.6), jnp.full((2, 4), 0.8)
    out = turn(x, cos, sin)
    assert out.dtype == jnp.bfloat16
    exact = turn(x.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(out, exact.astype(jnp.bfloat16))
