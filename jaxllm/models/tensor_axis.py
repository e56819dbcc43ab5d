"""The tensor axis of the step's shard_map, as models see it. Knows which part is whose; no parameters, no layers."""

import jax


def sum_over_ranks(part: jax.Array) -> jax.Array:
    """Adds up what each tensor rank has; one rank alone has it all, and XLA would not see that on a CPU."""
    return part if jax.lax.axis_size("tensor") == 1 else jax.lax.psum(part, "tensor")


def first_of_rank(num_own: int) -> jax.Array:
    """The first of the rank's own places along an axis that is split, of which each rank has so many."""
    return jax.lax.axis_index("tensor") * num_own
