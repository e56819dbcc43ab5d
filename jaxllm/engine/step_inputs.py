"""A step's inputs as one packed int32 array. Knows the layout only; who fills it and who reads it live elsewhere.

A call costs 4-5 microseconds for each argument, so all of a step's host data travels as one: the host writes through
numpy views, the step cuts the same fields out of the traced array at static offsets. Floats and unsigned integers keep
their bits.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.buckets import StepShape

UNKNOWN_TOKEN = -1  # the device knows it: the row's last sampled token


class StepInputs[A](NamedTuple):
    """T flat tokens of B requests; G KV groups, table width M. Unused entries are padding.

    token: its id, or UNKNOWN_TOKEN. position: in its request, -1 for padding. request: which of the B it belongs to.
    query_start: first flat token of each request, and the end. context_len: tokens up to and including this step's.
    row: the request's row, or the spare row for padding. samples: 1 where the step samples a token for the request.
    """

    token: A  # [T]
    position: A  # [T]
    request: A  # [T]
    query_start: A  # [B+1]
    context_len: A  # [B]
    row: A  # [B]
    samples: A  # [B]
    block_table: A  # [G, B, M]
    temperature: A  # [B] float32
    top_k: A  # [B]
    top_p: A  # [B] float32
    seed: A  # [B, 2] uint32


class FieldShape(NamedTuple):
    """The dimensions and the 32-bit type of one field."""

    dims: tuple[int, ...]
    dtype: type = np.int32


def field_shapes(shape: StepShape, num_groups: int) -> StepInputs[FieldShape]:
    """Gives the shape of each field, in the order in which they are packed."""
    T, B, M = shape.num_tokens, shape.num_requests, shape.table_width
    return StepInputs(
        token=FieldShape((T,)),
        position=FieldShape((T,)),
        request=FieldShape((T,)),
        query_start=FieldShape((B + 1,)),
        context_len=FieldShape((B,)),
        row=FieldShape((B,)),
        samples=FieldShape((B,)),
        block_table=FieldShape((num_groups, B, M)),
        temperature=FieldShape((B,), np.float32),
        top_k=FieldShape((B,)),
        top_p=FieldShape((B,), np.float32),
        seed=FieldShape((B, 2), np.uint32),
    )


def packed_size(shape: StepShape, num_groups: int) -> int:
    """The number of 32-bit words of a packed step."""
    return sum(math.prod(dims) for dims, _ in field_shapes(shape, num_groups))


def host_views(packed: np.ndarray, shape: StepShape, num_groups: int) -> StepInputs[np.ndarray]:
    """Views of the packed array for the host to write."""
    return StepInputs(*(packed[a:b].view(dtype).reshape(dims) for a, b, dims, dtype in _cuts(shape, num_groups)))


def unpack(packed: jax.Array, shape: StepShape, num_groups: int) -> StepInputs[jax.Array]:
    """The same fields inside the traced step."""
    return StepInputs(
        *(
            jax.lax.bitcast_convert_type(packed[a:b], jnp.dtype(dtype)).reshape(dims)
            for a, b, dims, dtype in _cuts(shape, num_groups)
        )
    )


def _cuts(shape: StepShape, num_groups: int):
    start = 0
    for dims, dtype in field_shapes(shape, num_groups):
        stop = start + math.prod(dims)
        yield start, stop, dims, dtype
        start = stop
