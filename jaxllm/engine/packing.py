"""Many small arrays as one packed int32 array. Knows fields' shapes and types; not what they mean.

A call of a compiled program costs 4-5 microseconds for each argument, so host data travels as one: the host writes
through numpy views, the program cuts the same fields out of the traced array at static offsets. Floats and unsigned
integers keep their bits.
"""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ALIGNMENT = 4  # words


class FieldShape(NamedTuple):
    """The dimensions and the 32-bit type of one field."""

    dims: tuple[int, ...]
    dtype: type = np.int32


def packed_size(fields: Iterable[FieldShape]) -> int:
    """The number of 32-bit words of the packed array."""
    cuts = _cuts(tuple(fields))
    return _aligned(cuts[-1].stop) if cuts else 0


def host_views(packed: np.ndarray, fields: Iterable[FieldShape]) -> list[np.ndarray]:
    """Views of the packed array for the host to write."""
    return [packed[a:b].view(dtype).reshape(dims) for a, b, dims, dtype in _cuts(tuple(fields))]


def host_rows(packed: np.ndarray, fields: Iterable[FieldShape], first: int, second: int, count: int) -> np.ndarray:
    """The first `count` numbers of two one-dimensional fields as a view [2, count], so that one call writes both."""
    cuts = _cuts(tuple(fields))
    start, distance = cuts[first].start, cuts[second].start - cuts[first].start
    return np.lib.stride_tricks.as_strided(packed[start:], (2, count), (distance * packed.itemsize, packed.itemsize))


def unpack(packed: jax.Array, fields: Iterable[FieldShape]) -> list[jax.Array]:
    """The same fields inside a traced program."""
    return [
        jax.lax.bitcast_convert_type(packed[a:b], jnp.dtype(dtype)).reshape(dims)
        for a, b, dims, dtype in _cuts(tuple(fields))
    ]


class _Cut(NamedTuple):
    """Where a field lies in the packed array."""

    start: int
    stop: int
    dims: tuple[int, ...]
    dtype: type


@lru_cache(maxsize=4096)  # a step asks for those of its shape, of which there are few
def _cuts(fields: tuple[FieldShape, ...]) -> tuple[_Cut, ...]:
    cuts, start = [], 0
    for dims, dtype in fields:
        stop = start + math.prod(dims)
        cuts.append(_Cut(start, stop, dims, dtype))
        start += _aligned(stop - start)
    return tuple(cuts)


def _aligned(num_words: int) -> int:
    return -(-num_words // ALIGNMENT) * ALIGNMENT
