"""The inputs of a forward pass. Knows the fields and their shapes; who fills and who reads them live elsewhere."""

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine import packing
from jaxllm.engine.buckets import StepShape
from jaxllm.engine.packing import FieldShape

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


@lru_cache(maxsize=1024)
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
    )


@lru_cache(maxsize=1024)
def packed_size(shape: StepShape, num_groups: int) -> int:
    """The number of 32-bit words of a packed step."""
    return packing.packed_size(field_shapes(shape, num_groups))


def host_views(packed: np.ndarray, shape: StepShape, num_groups: int) -> StepInputs[np.ndarray]:
    """Views of the packed array for the host to write."""
    return StepInputs(*packing.host_views(packed, field_shapes(shape, num_groups)))


def ends_view(packed: np.ndarray, shape: StepShape, num_groups: int, count: int) -> np.ndarray:
    """What changes from one decode step of the same requests to the next: [position, context_len] of the first ones."""
    fields = StepInputs._fields
    first, second = fields.index("position"), fields.index("context_len")
    return packing.host_rows(packed, field_shapes(shape, num_groups), first, second, count)


def unpack(packed: jax.Array, shape: StepShape, num_groups: int) -> StepInputs[jax.Array]:
    """The same fields inside the traced step, each an array of its own.

    A kernel that read a slice of the packed array, which is another one in each step, would be recorded anew each time.
    """
    fields = packing.unpack(packed, field_shapes(shape, num_groups))
    return StepInputs(*(jnp.maximum(field, UNKNOWN_TOKEN) for field in fields))  # no number is less: XLA cannot know
