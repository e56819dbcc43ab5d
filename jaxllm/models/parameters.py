"""Parameters with their logical axes, and products with them. Knows how a layer's matrices are stored; no model.

Every parameter is one line: its shape and its logical axes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxllm.kernels.matmul.choice import Stack
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


class LayerMatrix(NamedTuple):
    """The running layer's matrix, where it lies in the array of all layers, and the kernel that multiplies it there."""

    slice: jax.Array
    stacked: jax.Array
    layer: int | Int[Array, ""]
    matmul: Callable[..., jax.Array]


class LayerVector:
    """The running layer's scales or biases, and where they lie in the array of all layers."""

    def __init__(self, slice: jax.Array, stacked: jax.Array, layer: int | Int[Array, ""]):
        self.slice, self.stacked, self.layer = slice, stacked, layer

    def __getitem__(self, key: Any) -> jax.Array:
        return self.slice[key]


def in_place(**params: nnx.Param) -> dict[str, Any]:
    """Parameters by name, as operands of a kernel: those of all layers and `param_layer`, or the layer's own."""
    values = {name: param.get_value() for name, param in params.items()}
    vectors = [value for value in values.values() if isinstance(value, LayerVector)]
    if not vectors:
        return values
    return {name: value.stacked for name, value in values.items()} | {"param_layer": vectors[0].layer}


def times(x: jax.Array, scale: float) -> jax.Array:
    """Scales by a constant, in x's type."""
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def product(subscripts: str, x: jax.Array, param: nnx.Param) -> jax.Array:
    """The einsum of x and a weight, whose first axes are the last of x.

    Of a LayerChoice the running layer's branch multiplies, of a LayerMatrix its kernel, and no weight is copied.
    """
    weight = param.get_value()
    if isinstance(weight, LayerMatrix):
        return _multiply_in_place(x, weight)
    if not isinstance(weight, LayerChoice):
        return jnp.einsum(subscripts, x, weight)
    return jax.lax.switch(weight.layer, [lambda x, w=w: jnp.einsum(subscripts, x, w) for w in weight.arrays], x)


def _multiply_in_place(x: jax.Array, weight: LayerMatrix) -> jax.Array:
    shape = weight.slice.shape
    inputs, outputs = math.prod(shape[: x.ndim - 1]), shape[x.ndim - 1 :]
    flat = (inputs, math.prod(outputs))
    stack = Stack(weight.stacked.reshape(-1, *flat), weight.layer)
    out_TO = weight.matmul(x.reshape(-1, inputs), weight.slice.reshape(flat), stack=stack)
    return out_TO.reshape(-1, *outputs)
