"""The tensor axis of the step's shard_map, as models see it. Knows which part is whose; no parameters, no layers."""

import jax
import jax.numpy as jnp


def sum_over_ranks(part: jax.Array) -> jax.Array:
    """Adds up what each tensor rank has; one rank alone has it all, and XLA would not see that on a CPU."""
    return part if jax.lax.axis_size("tensor") == 1 else jax.lax.psum(part, "tensor")


def of_first_rank(whole: jax.Array) -> jax.Array:
    """Leaves what every rank has to the first one, for a sum over the ranks that shall have it once."""
    if jax.lax.axis_size("tensor") == 1:
        return whole
    return jnp.where(jax.lax.axis_index("tensor") == 0, whole, jnp.zeros_like(whole))


def first_of_rank(num_own: int) -> jax.Array:
    """The first of the rank's own places along an axis that is split, of which each rank has so many."""
    return jax.lax.axis_index("tensor") * num_own
