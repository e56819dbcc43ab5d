"""Parameters with their logical axes, and products with them. Knows how a layer's matrices are stored; no model.

Every parameter is one line: its shape and its logical axes.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxllm.models.config import ModelConfig

Axes = tuple[str | None, ...]


def weight(shape: tuple[int, ...], axes: Axes, cfg: ModelConfig, rngs: nnx.Rngs) -> nnx.Param:
    """A matrix, with one logical axis name per dimension."""
    value = jax.random.normal(rngs.params(), shape) * 0.02
    return nnx.Param(value.astype(jnp.dtype(cfg.dtype)), logical_axes=axes, role="matrix")


def norm_scale(shape: tuple[int, ...], axes: Axes, cfg: ModelConfig) -> nnx.Param:
    """What a norm multiplies by: ones, less the norm offset."""
    return nnx.Param(jnp.full(shape, 1.0 - cfg.norm_offset, jnp.dtype(cfg.dtype)), logical_axes=axes, role="norm")


def bias(shape: tuple[int, ...], axes: Axes, cfg: ModelConfig) -> nnx.Param:
    """What is added to a product or a norm: zeros."""
    return nnx.Param(jnp.zeros(shape, jnp.dtype(cfg.dtype)), logical_axes=axes, role="bias")


class LayerChoice:
    """A matrix of every layer, as {layer: array}, and the traced number of the layer that is running."""

    def __init__(self, layer: Int[Array, ""], arrays: dict[int, jax.Array]):
        self.layer = layer
        self.arrays = [arrays[l] for l in range(len(arrays))]


def product(subscripts: str, x: jax.Array, param: nnx.Param) -> jax.Array:
    """The einsum of x and a weight. Of a LayerChoice the running layer's branch multiplies, and no weight is copied."""
    weight = param.get_value()
    if not isinstance(weight, LayerChoice):
        return jnp.einsum(subscripts, x, weight)
    return jax.lax.switch(weight.layer, [lambda x, w=w: jnp.einsum(subscripts, x, w) for w in weight.arrays], x)
