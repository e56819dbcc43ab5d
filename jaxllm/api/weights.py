"""New weights in place of old ones: are they of the same kind? Knows trees of arrays; no engine."""

from typing import Any

import jax

from jaxllm.config.errors import InputError


def placed_like(new: Any, old: Any) -> Any:
    """Puts new weights where the old ones lie; those that lie there already are not copied.

    Raises:
        InputError: the trees differ, or an array's shape or dtype does; the first difference is named.
    """
    new_arrays, new_tree = _by_path(new)
    old_arrays, old_tree = _by_path(old)
    for what, here, there in (("missing", old_arrays, new_arrays), ("unknown", new_arrays, old_arrays)):
        differing = [path for path in here if path not in there]
        if differing:
            raise InputError(f"update_weights: {len(differing)} array(s) {what}, the first one is {differing[0]}")
    if new_tree != old_tree:
        raise InputError(f"update_weights: the tree is {new_tree}, the model's is {old_tree}: use its containers")
    for path, array in new_arrays.items():
        wanted = old_arrays[path]
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise InputError(
                f"update_weights: {path} is {array.dtype}{list(array.shape)}, the model has "
                f"{wanted.dtype}{list(wanted.shape)}: convert it"
            )
    return jax.tree.map(lambda array, place: jax.device_put(array, place.sharding), new, old)


def _by_path(weights: Any) -> tuple[dict[str, Any], Any]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}, tree
