"""The product of rows with one layer's matrix, by the kernel that was measured to be the fastest for its size.

Knows the device's table. Refuses to know how a kernel works. What the table does not know, XLA multiplies.
"""

import importlib

import jax
from jaxtyping import Array, Float

from jaxllm.kernels.launch import device_kind
from jaxllm.kernels.matmul import reference
from jaxllm.kernels.matmul.choice import Choice, Product, Stack, choose, read_table


def matmul(
    x: Float[Array, "T I"], weight: Float[Array, "I O"], *, transposed: bool = False, stack: Stack | None = None
) -> Float[Array, "T O"]:
    """Gives x @ weight in x's type; see the reference."""
    inputs, outputs = weight.shape[::-1] if transposed else weight.shape
    choice = choose(read_table(device_kind()), Product(inputs, outputs, transposed, x.dtype.name), x.shape[0])
    return multiply(choice, x, weight, transposed=transposed, stack=stack)


def multiply(
    choice: Choice,
    x: Float[Array, "T I"],
    weight: Float[Array, "I O"],
    *,
    transposed: bool = False,
    stack: Stack | None = None,
) -> jax.Array:
    """The same with the choice given."""
    if choice.config is None:
        return reference.matmul(x, weight, transposed=transposed)
    module = {"triton": "triton_few_rows", "mosaic": "mosaic"}[choice.kernel]
    kernel = importlib.import_module(f"jaxllm.kernels.matmul.{module}")
    return kernel.multiply(choice.config, x, stack or Stack(weight[None], 0), transposed=transposed)
