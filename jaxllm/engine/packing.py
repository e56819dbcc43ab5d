"""Many small arrays as one packed int32 array. Knows fields' shapes and types; not what they mean.

A call of a compiled program costs 4-5 microseconds for each argument, so host data travels as one: the host writes
through numpy views, the program cuts the same fields out of the traced array at static offsets. Floats and unsigned
integers keep their bits.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class FieldShape(NamedTuple):
    """The dimensions and the 32-bit type of one field."""

    dims: tuple[int, ...]
    dtype: type = np.int32


def packed_size(fields: Iterable[FieldShape]) -> int:
    """The number of 32-bit words of the packed array."""
    return sum(math.prod(dims) for dims, _ in fields)


def host_views(packed: np.ndarray, fields: Iterable[FieldShape]) -> list[np.ndarray]:
    """Views of the packed array for the host to write."""
    return [packed[a:b].view(dtype).reshape(dims) for a, b, dims, dtype in _cuts(fields)]


def unpack(packed: jax.Array, fields: Iterable[FieldShape]) -> list[jax.Array]:
    """The same fields inside a traced program."""
    return [
        jax.lax.bitcast_convert_type(packed[a:b], jnp.dtype(dtype)).reshape(dims) for a, b, dims, dtype in _cuts(fields)
    ]


def _cuts(fields: Iterable[FieldShape]) -> Iterator[tuple[int, int, tuple[int, ...], type]]:
    start = 0
    for dims, dtype in fields:
        stop = start + math.prod(dims)
        yield start, stop, dims, dtype
        start = stop
