"""Room for the small arrays of steps, so that a step's temporaries stay where they are. Knows sizes; no steps.

A GPU's step is a recorded graph of kernels and addresses. XLA gives it memory for temporaries at every call, from the
beginning of the allocator's free rest, and records again what has moved: 0.7 ms for 400 kernels on an H200. Inputs and
answers of other steps in flight move it when they are cut from that rest. They are not where holes of their size exist:
the allocator takes the smallest free piece that fits.
"""

from collections.abc import Callable

import jax
import numpy as np

SMALLEST = 256  # bytes: the allocator's unit
NUM_EACH = 6  # inputs and answers of two steps in flight, and of the next


def leave_holes(largest: int, to_device: Callable[[np.ndarray], jax.Array]) -> list[jax.Array]:
    """Leaves holes of every power of two up to `largest` bytes; they stay apart while the arrays returned live."""
    sizes = [SMALLEST << i for i in range(max(1, (-(-largest // SMALLEST) - 1).bit_length() + 1))]
    holes, fences = [], []
    for size in sizes:
        for _ in range(NUM_EACH):
            holes.append(to_device(np.zeros(size, np.uint8)))
            fences.append(to_device(np.zeros(SMALLEST, np.uint8)))
    jax.block_until_ready((holes, fences))
    return fences
