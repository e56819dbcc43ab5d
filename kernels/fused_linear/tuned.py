"""Fused products where the device's table has them; otherwise norm, product and what follows, one after the other.

Knows the table. Refuses to know how a kernel works.
"""

import importlib
from types import ModuleType

from jaxtyping import Array, Float, Int

from jaxllm.kernels.all_reduce.reference import all_reduce
from jaxllm.kernels.fused_linear.choice import Fused, FusedConfig, NormStack, choose, fits_a_chunk, read_table
from jaxllm.kernels.fused_linear.reference import gated
from jaxllm.kernels.launch import device_kind
from jaxllm.kernels.matmul.choice import Stack
from jaxllm.kernels.matmul.tuned import matmul
from jaxllm.kernels.rms_norm.reference import rms_norm


def norm_linear(
    x: Float[Array, "T I"],
    scale: Float[Array, " I"],
    weight: Float[Array, "I O"],
    *,
    eps: float,
    offset: float = 0.0,
    norm_stack: NormStack | None = None,
    stack: Stack | None = None,
) -> Float[Array, "T O"]:
    """Gives rms_norm(x) @ weight; see the reference."""
    config = _config("norm_linear", x, weight)
    if config is None:
        return matmul(rms_norm(x, scale, eps=eps, offset=offset), weight, stack=stack)
    norm_stack, stack = norm_stack or NormStack(scale[None], 0), stack or Stack(weight[None], 0)
    return _kernels().norm_linear(config, x, norm_stack, stack, eps=eps, offset=offset)


def norm_gated_linear(
    x: Float[Array, "T I"],
    scale: Float[Array, " I"],
    weight: Float[Array, "I 2*F"],
    *,
    activation: str,
    eps: float,
    offset: float = 0.0,
    norm_stack: NormStack | None = None,
    stack: Stack | None = None,
) -> Float[Array, "T F"]:
    """Gives activation(gate) * up, of gate and up = rms_norm(x) @ weight; see the reference."""
    config = _config("norm_gated_linear", x, weight)
    if config is None:
        return gated(matmul(rms_norm(x, scale, eps=eps, offset=offset), weight, stack=stack), activation)
    norm_stack, stack = norm_stack or NormStack(scale[None], 0), stack or Stack(weight[None], 0)
    return _kernels().norm_gated_linear(config, x, norm_stack, stack, activation=activation, eps=eps, offset=offset)


def linear_add(
    x: Float[Array, "T I"],
    weight: Float[Array, "I O"],
    residual: Float[Array, "T O"] | None,
    *,
    stack: Stack | None = None,
) -> Float[Array, "T O"]:
    """Gives residual + x @ weight, or the product alone; see the reference."""
    config = _config("linear_add", x, weight)
    if config is None:
        product_TO = matmul(x, weight, stack=stack)
        return product_TO if residual is None else residual + product_TO
    return _kernels().linear_add(config, x, stack or Stack(weight[None], 0), residual)


def linear_all_reduce(
    x: Float[Array, "T I"],
    weight: Float[Array, "I O"],
    residual: Float[Array, "T O"] | None,
    *,
    stack: Stack | None = None,
    peers: Int[Array, " W"] | None = None,
) -> Float[Array, "T O"]:
    """Gives residual + the sum over the tensor ranks of x @ weight; see the reference, and all_reduce for `peers`."""
    config = _config("linear_all_reduce", x, weight)
    if peers is None:
        return all_reduce(linear_add(x, weight, None, stack=stack), residual)
    if config is None or not fits_a_chunk(config, x.shape[0]):
        exchange = importlib.import_module("jaxllm.kernels.all_reduce.triton").all_reduce
        return exchange(linear_add(x, weight, None, stack=stack), residual, peers=peers)
    return _kernels().linear_all_reduce(config, x, stack or Stack(weight[None], 0), residual, peers)


def _config(operation: str, x, weight) -> FusedConfig | None:
    inputs, outputs = weight.shape
    return choose(read_table(device_kind()), Fused(operation, inputs, outputs, x.dtype.name), x.shape[0])


def _kernels() -> ModuleType:
    return importlib.import_module("jaxllm.kernels.fused_linear.triton")
