"""A layer's products with the norm before and the residual after them: one kernel where there is one that fits.

Knows how a layer's parameters are stored, and the tensor axis. Refuses to know which rows a kernel is worth it for.
"""

import math
from typing import Any, NamedTuple, TypeGuard

import jax
from flax import nnx

from jaxllm.kernels.fused_linear.choice import NormStack
from jaxllm.kernels.fused_linear.reference import ACTIVATIONS
from jaxllm.kernels.matmul.choice import Stack
from jaxllm.models.norms import NoNorm, Norm
from jaxllm.models.parameters import LayerMatrix, LayerVector, product, times
from jaxllm.models.step_context import Kernels
from jaxllm.models.tensor_axis import of_first_rank, sum_over_ranks


class Residual(NamedTuple):
    """What a sub-layer's result is added to, behind its norm and times its scale."""

    x_TD: jax.Array
    norm: Norm | NoNorm
    scale: float

    @property
    def is_plain(self) -> bool:
        return isinstance(self.norm, NoNorm) and self.scale == 1.0


def norm_linear(subscripts: str, x_TD, norm: Norm | NoNorm, param: nnx.Param, kernels: Kernels) -> jax.Array:
    """The product of the normed rows and a weight."""
    weight = param.get_value()
    if not (isinstance(weight, LayerMatrix) and _is_rms(norm)):
        return product(subscripts, norm(x_TD, kernels), param)
    scale, norm_options = _scale_operand(norm)
    flat_IO, stack = _matrix_operand(weight, 1)
    out_TO = kernels.norm_linear(x_TD, scale, flat_IO, stack=stack, **norm_options)
    return out_TO.reshape(-1, *weight.slice.shape[1:])


def norm_gated_linear(
    x_TD, norm: Norm | NoNorm, param: nnx.Param, bias_2F: jax.Array | None, activation: str, kernels: Kernels
) -> jax.Array:
    """activation(gate) * up, of the normed rows' products with a weight [D, 2, F]."""
    weight = param.get_value()
    if bias_2F is None and isinstance(weight, LayerMatrix) and _is_rms(norm):
        scale, norm_options = _scale_operand(norm)
        flat_IO, stack = _matrix_operand(weight, 1)
        return kernels.norm_gated_linear(x_TD, scale, flat_IO, stack=stack, activation=activation, **norm_options)
    gate_up_T2F = product("TD,DiF->TiF", norm(x_TD, kernels), param)
    if bias_2F is not None:
        gate_up_T2F = gate_up_T2F + bias_2F
    return ACTIVATIONS[activation](gate_up_T2F[:, 0]) * gate_up_T2F[:, 1]


def linear_add(
    subscripts: str, x, param: nnx.Param, bias_D: jax.Array | None, residual: Residual | None, kernels: Kernels
) -> jax.Array:
    """The product of x and a weight, whose parts the tensor ranks add up, and the residual.

    Without a residual it is the rank's own part: of several products whoever adds them up has the ranks do so once.
    """
    plain_TD = residual.x_TD if bias_D is None and residual is not None and residual.is_plain else None
    if plain_TD is not None:
        return _linear_add_over_ranks(subscripts, x, param, plain_TD, kernels)
    part_TD = _linear_add(subscripts, x, param, None, kernels)
    if residual is None:
        return part_TD if bias_D is None else part_TD + of_first_rank(bias_D)
    out_TD = sum_over_ranks(part_TD, kernels)
    out_TD = out_TD if bias_D is None else out_TD + bias_D
    return residual.x_TD + times(residual.norm(out_TD, kernels), residual.scale)


def _linear_add_over_ranks(subscripts: str, x, param: nnx.Param, residual_TD, kernels: Kernels) -> jax.Array:
    weight = param.get_value()
    if jax.lax.axis_size("tensor") == 1:
        return _linear_add(subscripts, x, param, residual_TD, kernels)
    if isinstance(weight, LayerMatrix):
        flat_IO, stack = _matrix_operand(weight, x.ndim - 1)
        return kernels.linear_all_reduce(x.reshape(len(x), -1), flat_IO, residual_TD, stack=stack)
    return sum_over_ranks(product(subscripts, x, param), kernels, residual_TD)


def _linear_add(subscripts: str, x, param: nnx.Param, residual_TD: jax.Array | None, kernels: Kernels) -> jax.Array:
    weight = param.get_value()
    if isinstance(weight, LayerMatrix):
        flat_IO, stack = _matrix_operand(weight, x.ndim - 1)
        return kernels.linear_add(x.reshape(len(x), -1), flat_IO, residual_TD, stack=stack)
    part_TD = product(subscripts, x, param)
    return part_TD if residual_TD is None else residual_TD + part_TD


def _is_rms(norm: Norm | NoNorm) -> TypeGuard[Norm]:
    return isinstance(norm, Norm) and norm.cfg.norm == "rms"


def _scale_operand(norm: Norm) -> tuple[jax.Array, dict[str, Any]]:
    scale = norm.scale.get_value()
    stack = NormStack(scale.stacked, scale.layer) if isinstance(scale, LayerVector) else None
    return norm.scale[...], {"norm_stack": stack, "eps": norm.cfg.norm_eps, "offset": norm.cfg.norm_offset}


def _matrix_operand(weight: LayerMatrix, num_inputs: int) -> tuple[jax.Array, Stack]:
    """The matrix, whose first axes are inputs, as [I, O], and the stack of them."""
    shape = weight.slice.shape
    flat = (math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:]))
    return weight.slice.reshape(flat), Stack(weight.stacked.reshape(-1, *flat), weight.layer)
