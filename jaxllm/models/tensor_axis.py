"""The tensor axis of the step's shard_map, as models see it. Knows which part is whose; no parameters, no layers."""

import jax
import jax.numpy as jnp

from jaxllm.models.step_context import Kernels


def sum_over_ranks(part: jax.Array, kernels: Kernels, residual: jax.Array | None = None) -> jax.Array:
    """Adds up what each tensor rank has, and the residual; one rank alone has it all, which XLA on a CPU overlooks."""
    if jax.lax.axis_size("tensor") > 1:
        return kernels.all_reduce(part, residual)
    return part if residual is None else residual + part


def sum_apart(part: jax.Array) -> jax.Array:
    """The same for sums that do not wait for each other: kernels that exchange parts have to follow one another."""
    return part if jax.lax.axis_size("tensor") == 1 else jax.lax.psum(part, "tensor")


def of_first_rank(whole: jax.Array) -> jax.Array:
    """Leaves what every rank has to the first one, for a sum over the ranks that shall have it once."""
    if jax.lax.axis_size("tensor") == 1:
        return whole
    return jnp.where(jax.lax.axis_index("tensor") == 0, whole, jnp.zeros_like(whole))


def first_of_rank(num_own: int) -> jax.Array:
    """The first of the rank's own places along an axis that is split, of which each rank has so many."""
    return jax.lax.axis_index("tensor") * num_own
