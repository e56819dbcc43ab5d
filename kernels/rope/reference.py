"""Rotary position embedding in plain XLA (Su et al., 2021, arXiv:2104.09864), in the half-split form of Llama."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def apply_rope(x: Float[Array, "T N H"], cos: Float[Array, "T R"], sin: Float[Array, "T R"]) -> Float[Array, "T N H"]:
    """Rotates the first 2R of the H features of each head, feature i with feature i + R; the rest passes."""
    R = cos.shape[-1]
    x1, x2, rest = jnp.split(x.astype(jnp.float32), [R, 2 * R], axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], axis=-1).astype(x.dtype)
