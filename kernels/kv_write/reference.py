"""The scatter of new keys and values in plain XLA. Knows slots only: not which request a slot belongs to."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def kv_write(
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    block: Int[Array, " T"],
    offset: Int[Array, " T"],
) -> Float[Array, "L P 2 K C H"]:
    """Stores each token's key and value at (layer, block, offset). Padding tokens name block 0, which nobody reads."""
    kv_T2KH = jnp.stack([key, value], axis=1).astype(kv_cache.dtype)
    return kv_cache.at[layer, block, :, :, offset].set(kv_T2KH, mode="promise_in_bounds")
