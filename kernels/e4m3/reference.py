"""8-bit numbers of the KV cache (e4m3: 4 bits of exponent, 3 of mantissa, up to 448) in plain XLA.

A cache of 8-bit numbers is an array of bytes: XLA scatters those in place. Of its own 8-bit floats it would widen the
whole cache first, and turning one into the other is a copy on a CPU. Knows numbers; not where they are kept.
"""

import jax
import jax.numpy as jnp

E4M3 = jnp.dtype(jnp.uint8)  # the type of their cache
LARGEST = 448.0


def narrow(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Casts to the type of a cache; to bytes by way of the nearest e4m3 number, ties to even, saturating."""
    if dtype != E4M3:
        return x.astype(dtype)
    number = jnp.clip(x.astype(jnp.float32), -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return jax.lax.bitcast_convert_type(number, dtype)


def widen(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Casts what comes from a cache; bytes are e4m3 numbers."""
    if x.dtype == E4M3:
        x = jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn)
    return x.astype(dtype)
