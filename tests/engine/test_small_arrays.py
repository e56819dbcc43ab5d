"""Holes for small arrays: the sizes that are there, and what keeps them apart."""

import jax.numpy as jnp

from jaxllm.engine.small_arrays import NUM_EACH, SMALLEST, leave_holes


def test_there_are_holes_of_every_power_of_two_up_to_the_largest_and_fences_between_them():
    made = []

    def to_device(array):
        made.append(array.nbytes)
        return jnp.asarray(array)

    fences = leave_holes(1100, to_device)
    assert made[0::2] == [size for size in (256, 512, 1024, 2048) for _ in range(NUM_EACH)]
    assert made[1::2] == [SMALLEST] * len(fences)
    assert [fence.nbytes for fence in fences] == [SMALLEST] * 4 * NUM_EACH


def test_one_unit_is_the_smallest_hole():
    sizes = []
    leave_holes(4, lambda array: sizes.append(array.nbytes) or jnp.asarray(array))
    assert set(sizes) == {SMALLEST}
