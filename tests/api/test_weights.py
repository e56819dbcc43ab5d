import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.api.weights import placed_like
from jaxllm.config.errors import InputError

OLD = {"embed": jnp.ones((4, 2)), "layers": {"up": jnp.ones((2, 3)), "down": jnp.ones((3, 2), jnp.bfloat16)}}


def changed(**changes):
    return {"embed": OLD["embed"], "layers": OLD["layers"] | changes}


def test_equal_trees_are_placed_where_the_old_ones_lie():
    new = jax.tree.map(lambda array: np.asarray(array) * 2, OLD)
    placed = placed_like(new, OLD)
    assert jax.tree.structure(placed) == jax.tree.structure(OLD)
    assert all(array.sharding == old.sharding for array, old in zip(*map(jax.tree.leaves, (placed, OLD)), strict=True))
    np.testing.assert_array_equal(placed["layers"]["up"], 2 * OLD["layers"]["up"])
    same = placed_like(OLD, OLD)
    assert same["embed"].unsafe_buffer_pointer() == OLD["embed"].unsafe_buffer_pointer()


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"embed": OLD["embed"]}, r"2 array\(s\) missing, the first one is layers/down"),
        (changed(gate=jnp.ones(3)), r"1 array\(s\) unknown, the first one is layers/gate"),
        (changed(up=jnp.ones((3, 2))), r"layers/up is float32\[3, 2\], the model has float32\[2, 3\]: convert it"),
        (changed(down=jnp.ones((3, 2))), r"layers/down is float32\[3, 2\], the model has bfloat16\[3, 2\]"),
    ],
)
def test_the_first_difference_is_named(new, message):
    with pytest.raises(InputError, match=message) as caught:
        placed_like(new, OLD)
    assert "\n" not in str(caught.value)
