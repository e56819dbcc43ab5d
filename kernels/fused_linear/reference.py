"""Products with the norm before and what follows them, in plain XLA: the references of each in turn.

They are the specification: a GPU version has these names and signatures. Where there is a stack, `weight` is its slice
at the running layer, and `scale` that of the stack's scales.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from jaxllm.kernels.all_reduce.reference import all_reduce
from jaxllm.kernels.fused_linear.choice import NormStack
from jaxllm.kernels.matmul.choice import Stack
from jaxllm.kernels.matmul.reference import matmul
from jaxllm.kernels.rms_norm.reference import rms_norm

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


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
    """Gives rms_norm(x) @ weight."""
    return matmul(rms_norm(x, scale, eps=eps, offset=offset), weight)


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
    """Gives activation(gate) * up, of gate and up = rms_norm(x) @ weight, which lie side by side."""
    return gated(matmul(rms_norm(x, scale, eps=eps, offset=offset), weight), activation)


def linear_add(
    x: Float[Array, "T I"],
    weight: Float[Array, "I O"],
    residual: Float[Array, "T O"] | None,
    *,
    stack: Stack | None = None,
) -> Float[Array, "T O"]:
    """Gives residual + x @ weight, or the product alone."""
    product_TO = matmul(x, weight)
    return product_TO if residual is None else residual + product_TO


def linear_all_reduce(
    x: Float[Array, "T I"],
    weight: Float[Array, "I O"],
    residual: Float[Array, "T O"] | None,
    *,
    stack: Stack | None = None,
    peers: Int[Array, " W"] | None = None,
) -> Float[Array, "T O"]:
    """Gives residual + the sum over the tensor ranks of x @ weight."""
    return all_reduce(matmul(x, weight), residual)


def gated(gate_up: Float[Array, "T 2*F"], activation: str) -> Float[Array, "T F"]:
    """Gives activation(gate) * up."""
    gate_up_T2F = gate_up.reshape(gate_up.shape[0], 2, -1)
    return ACTIVATIONS[activation](gate_up_T2F[:, 0]) * gate_up_T2F[:, 1]
