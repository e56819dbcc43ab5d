"""A caller's parameters -> weights that the programs run on, in the caller's own buffers wherever that can be.

Knows what programs take; no requests, and not where the parameters came from.
"""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxllm.engine.memory import show_bytes
from jaxllm.engine.step import StepProgram
from jaxllm.engine.step_compiler import abstract_params
from jaxllm.mesh.adopt import Adopted, adopt
from jaxllm.mesh.caller import without_callers_mesh
from jaxllm.models.forward import ParamSpec, weights_tree
from jaxllm.models.given import Params, arrange
from jaxllm.models.placement import axis_numbers

logger = logging.getLogger(__name__)


def take_weights(program: StepProgram, params: Params, *, casts: bool = True) -> Adopted:
    """Gives the weights of a program from parameters that another program holds, and says what was copied.

    Raises:
        InputError: one is missing, is not expected, or has another shape; or another type, and it may not be cast.
    """
    dtype, wanted = jnp.dtype(program.decoder.cfg.dtype), abstract_params(program)
    with without_callers_mesh():
        arranged = arrange(params, program.decoder, None if casts else dtype)
        each = [
            adopt(array, want) if array.shape == want.shape else _lay_out(array, spec, want, program)
            for array, spec, want in zip(arranged.arrays, program.decoder.params, wanted, strict=True)
        ]
    made = sum(one.in_place for one, is_new in zip(each, arranged.is_new, strict=True) if is_new)
    paths = [spec.path for spec in program.decoder.params]
    taken = Adopted(
        weights_tree({path: one.tree for path, one in zip(paths, each, strict=True)}),
        moved=sum(one.moved for one in each),
        in_place=sum(one.in_place for one in each) - made,
        copied=sum(one.copied for one in each) + made,
    )
    logger.info("weights: %s", show_taken(taken))
    return taken


def show_taken(taken: Adopted) -> str:
    """Says how many bytes of the weights are the caller's own buffers, and how many are not."""
    between = f", {show_bytes(taken.moved)} of them from other devices" if taken.moved else ""
    return f"{show_bytes(taken.in_place)} used in place, {show_bytes(taken.copied)} copied{between}"


def _lay_out(array: Any, spec: ParamSpec, want: jax.ShapeDtypeStruct, program: StepProgram) -> Adopted:
    """Lays an array out for the tensor ranks: repeats heads and leaves places empty, as models/heads.py says.

    Every device has the whole array for a moment.
    """
    whole = adopt(array, jax.ShapeDtypeStruct(array.shape, want.dtype, sharding=program.sharding(PartitionSpec())))
    by_axis, filled = axis_numbers(spec.stored_axes, spec.stored_shape, program.decoder.cfg)
    split = {axis: own for axis, own in enumerate(by_axis) if own is not None}
    shape = tuple(size if axis in split else 1 for axis, size in enumerate(spec.stored_shape))
    places = [np.maximum(np.broadcast_to(own, shape), 0).squeeze() for own in split.values()]
    index = (slice(None),) * min(split) + tuple(places)

    def lay_out(array: jax.Array, filled: jax.Array) -> jax.Array:
        return jnp.where(filled, array[index], jnp.zeros((), array.dtype))

    made = jax.jit(lay_out, out_shardings=want.sharding)(whole.tree, filled)
    return Adopted(made, moved=whole.moved, copied=sum(shard.data.nbytes for shard in made.addressable_shards))
