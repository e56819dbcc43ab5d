"""LayerNorm in plain XLA (Ba et al., 2016, arXiv:1607.06450)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def layer_norm(x: Float[Array, "... D"], weight: Float[Array, "*#W D"], bias: jax.Array | None = None, *, eps: float):
    """Takes the mean of the last axis away, divides by the deviation, and scales; all in float32.

    The weight may have more axes, as one for each head: it is broadcast.
    """
    x_f32 = x.astype(jnp.float32)
    centred = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    out = centred * scale * weight.astype(jnp.float32)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)
