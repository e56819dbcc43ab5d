"""The product of rows with one layer's matrix, by the kernel that was measured to be the fastest for its size.

Knows the device's table. Refuses to know how a kernel works. What the table does not know, XLA multiplies.
"""

import functools
import importlib
import logging
from types import ModuleType

import jax
from jaxtyping import Array, Float

from jaxllm.kernels.launch import device_kind
from jaxllm.kernels.matmul import reference
from jaxllm.kernels.matmul.choice import XLA, Choice, Product, Stack, choose, read_table

logger = logging.getLogger(__name__)

MODULES = {"triton": "triton_few_rows", "mosaic": "mosaic", "turned": "mosaic_turned"}


def matmul(
    x: Float[Array, "T I"], weight: Float[Array, "I O"], *, transposed: bool = False, stack: Stack | None = None
) -> Float[Array, "T O"]:
    """Gives x @ weight in x's type; see the reference."""
    inputs, outputs = weight.shape[::-1] if transposed else weight.shape
    choice = choose(read_table(device_kind()), Product(inputs, outputs, transposed, x.dtype.name), x.shape[0])
    if choice.config is not None and not is_usable(choice.kernel):
        choice = XLA
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
    return load(choice.kernel).multiply(choice.config, x, stack or Stack(weight[None], 0), transposed=transposed)


def load(kernel: str) -> ModuleType:
    """Gives the module of a kernel."""
    return importlib.import_module("jaxllm.kernels.matmul." + MODULES[kernel])


@functools.cache
def is_usable(kernel: str) -> bool:
    """Tells whether a kernel can be imported, and says so once where it cannot."""
    try:
        load(kernel)
    except Exception as error:  # of experimental parts of other packages; it can be anything
        logger.warning("matmul: %s cannot be used, XLA multiplies instead: %r", kernel, error)
        return False
    return True
