"""RMSNorm in plain XLA (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], *, eps: float, offset: float = 0.0):
    """Normalises the last axis in float32 and scales it by (offset + weight); Gemma stores weight - 1, so offset 1."""
    x_f32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + eps)
    return (x_f32 * scale * (offset + weight.astype(jnp.float32))).astype(x.dtype)
