"""The sizes that every case has in common: those of an 8B Llama."""

import jax.numpy as jnp

N, K, H = 32, 8, 128  # the heads of an 8B Llama
DTYPE = jnp.dtype(jnp.bfloat16)
