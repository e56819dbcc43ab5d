"""The sum of the tensor ranks' parts, by XLA's own collective: the specification.

Knows the tensor axis of the step's shard_map. Refuses to know what is added up.
"""

import jax
from jaxtyping import Array, Int, Shaped


def all_reduce(
    part: Shaped[Array, "*S"], residual: Shaped[Array, "*S"] | None = None, *, peers: Int[Array, " W"] | None = None
) -> Shaped[Array, "*S"]:
    """Gives the sum of all ranks' parts, and the residual beside it, on every rank; `peers` are for other versions."""
    total = jax.lax.psum(part, "tensor")
    return total if residual is None else residual + total
