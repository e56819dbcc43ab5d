"""8-bit numbers of the KV cache (e4m3: 4 bits of exponent, 3 of mantissa, up to 448) in plain XLA. Knows no caches."""

import jax
import jax.numpy as jnp

E4M3 = jnp.dtype(jnp.float8_e4m3fn)
LARGEST = 448.0


def cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Casts to the nearest number, ties to even; beyond the range of e4m3 to its largest, which would else be NaN."""
    if dtype != E4M3:
        return x.astype(dtype)
    return jnp.clip(x.astype(jnp.float32), -LARGEST, LARGEST).astype(dtype)
