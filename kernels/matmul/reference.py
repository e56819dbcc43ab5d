"""The product of rows with a matrix, in plain XLA. The specification: a GPU version has this name and signature."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.kernels.matmul.choice import Stack


def matmul(
    x: Float[Array, "T I"], weight: Float[Array, "I O"], *, transposed: bool = False, stack: Stack | None = None
) -> Float[Array, "T O"]:
    """Gives x @ weight in x's type, summed in float32. A transposed weight is stored as [O, I].

    The weight is a slice of the stack, where there is one. XLA reads a slice where it lies; a kernel that was handed
    one would get a copy, and so takes the whole stack and the number of the layer.
    """
    return jnp.einsum("TI,OI->TO" if transposed else "TI,IO->TO", x, weight)
