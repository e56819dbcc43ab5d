"""The scatter of new keys and values in plain XLA. Knows slots only: not which request a slot belongs to."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.kernels.e4m3.reference import narrow


def kv_write(
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    key: Float[Array, "T K H"],
    value: Float[Array, "T K H"],
    block: Int[Array, " T"],
    offset: Int[Array, " T"],
) -> Float[Array, "L P 2 K C H"]:
    """Stores each token's key and value at (layer, block, offset). Padding tokens name block 0, which nobody reads.

    They are cast to the type of the cache; one of bytes keeps e4m3 numbers, which saturate.
    """
    kv_T2KH = narrow(jnp.stack([key, value], axis=1), kv_cache.dtype)
    return kv_cache.at[layer, block, :, :, offset].set(kv_T2KH, mode="promise_in_bounds")
