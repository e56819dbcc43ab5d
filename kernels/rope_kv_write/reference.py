"""Bias, head norms, rotary embedding and KV write as one operation, in plain XLA: the references of each in turn."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.kernels.kv_write.reference import kv_write
from jaxllm.kernels.rms_norm.reference import rms_norm
from jaxllm.kernels.rope.reference import apply_rope


def rope_kv_write(
    kv_cache: Float[Array, "L P 2 K C H"],
    layer: int | Int[Array, ""],
    qkv: Float[Array, "T K J H"],
    cos: Float[Array, "T R"],
    sin: Float[Array, "T R"],
    block: Int[Array, " T"],
    offset: Int[Array, " T"],
    *,
    bias: Float[Array, "*L K J H"] | None = None,
    q_norm: Float[Array, "*L H"] | None = None,
    k_norm: Float[Array, "*L H"] | None = None,
    param_layer: int | Int[Array, ""] | None = None,
    kv_scale: Float[Array, "2"] | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, "T N H"], Float[Array, "L P 2 K C H"]]:
    """Gives the queries and the cache with each token's key and value at (layer, block, offset).

    The J entries of a KV head are its G query heads, its key, its value. Norms (both or none) come before the rotation.
    With `kv_scale` keys are stored divided by its first number and values by its second; the queries come multiplied by
    the first, so that their products with what is stored are the right ones. What is stored saturates in bytes.
    With `param_layer` bias and norms are those of all layers, and it is the running one of them.
    """
    if param_layer is not None:
        bias, q_norm, k_norm = (None if param is None else param[param_layer] for param in (bias, q_norm, k_norm))
    query_TNH, key_TKH, value_TKH = split_and_turn(qkv, cos, sin, bias, q_norm, k_norm, eps, norm_offset)
    if kv_scale is not None:
        query_TNH = (query_TNH.astype(jnp.float32) * kv_scale[0]).astype(qkv.dtype)
        key_TKH = key_TKH.astype(jnp.float32) * (1.0 / kv_scale[0])
        value_TKH = value_TKH.astype(jnp.float32) * (1.0 / kv_scale[1])
    return query_TNH, kv_write(kv_cache, layer, key_TKH, value_TKH, block, offset)


def split_and_turn(
    qkv: Float[Array, "T K J H"],
    cos: Float[Array, "T R"],
    sin: Float[Array, "T R"],
    bias: Float[Array, "K J H"] | None = None,
    q_norm: Float[Array, " H"] | None = None,
    k_norm: Float[Array, " H"] | None = None,
    eps: float = 0.0,
    norm_offset: float = 0.0,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Gives queries, keys and values, all but the write."""
    if bias is not None:
        qkv = qkv + bias
    T, _, _, H = qkv.shape
    query_TNH = qkv[:, :, :-2].reshape(T, -1, H)
    key_TKH, value_TKH = qkv[:, :, -2], qkv[:, :, -1]
    if q_norm is not None and k_norm is not None:
        query_TNH = rms_norm(query_TNH, q_norm, eps=eps, offset=norm_offset)
        key_TKH = rms_norm(key_TKH, k_norm, eps=eps, offset=norm_offset)
    return apply_rope(query_TNH, cos, sin), apply_rope(key_TKH, cos, sin), value_TKH
