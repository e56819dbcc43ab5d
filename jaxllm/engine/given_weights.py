"""A caller's parameters -> weights that the programs run on, in the caller's own buffers wherever that can be.

Knows what programs take; no requests, and not where the parameters came from.
"""

import logging

import jax.numpy as jnp

from jaxllm.engine.memory import show_bytes
from jaxllm.engine.step import StepProgram
from jaxllm.engine.step_compiler import abstract_params
from jaxllm.mesh.adopt import Adopted, adopt
from jaxllm.mesh.caller import without_callers_mesh
from jaxllm.models.forward import weights_tree
from jaxllm.models.given import Params, arrange

logger = logging.getLogger(__name__)


def take_weights(program: StepProgram, params: Params, *, casts: bool = True) -> Adopted:
    """Gives the weights of a program from parameters that another program holds, and says what was copied.

    Raises:
        InputError: one is missing, is not expected, or has another shape; or another type, and it may not be cast.
    """
    dtype, wanted = jnp.dtype(program.decoder.cfg.dtype), abstract_params(program)
    with without_callers_mesh():
        arranged = arrange(params, program.decoder, None if casts else dtype)
        each = [adopt(array, want) for array, want in zip(arranged.arrays, wanted, strict=True)]
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
