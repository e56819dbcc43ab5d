"""Arrays that a program holds -> the same buffers under the engine's shardings, copied only where they must be.

Knows arrays and shardings; no models.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from jaxlib._jax import Device

Box = tuple[tuple[int, int], ...]  # the start and end of a slice along each axis


class Adopted(NamedTuple):
    """Arrays as the engine wants them, and bytes over all devices by how they came there."""

    tree: Any
    moved: int = 0  # were not on their device before
    in_place: int = 0  # in the very buffers that were given
    copied: int = 0  # in new buffers


def adopt(tree: Any, wanted: Any) -> Adopted:
    """Gives a tree of arrays the shardings and types of `wanted`, a tree of jax.ShapeDtypeStruct.

    An array of which each device holds what it shall hold keeps its buffers; any other is copied once.
    """
    leaves, structure = jax.tree.flatten(tree)
    each = [_adopt_one(array, want) for array, want in zip(leaves, structure.flatten_up_to(wanted), strict=True)]
    sums = [sum(counts) for counts in zip(*(one[1:] for one in each), strict=True)] or [0, 0, 0]
    return Adopted(structure.unflatten([one.tree for one in each]), *sums)


def _adopt_one(array: Any, want: jax.ShapeDtypeStruct) -> Adopted:
    shape, itemsize, sharding = want.shape, np.dtype(want.dtype).itemsize, want.sharding
    assert sharding is not None
    needed = _boxes(sharding, shape)
    total = sum(map(_volume, needed.values())) * itemsize
    held = _boxes(array.sharding, shape) if isinstance(array, jax.Array) else {}
    if array.dtype == want.dtype and _is_in_place(array, sharding, held, needed):
        buffers = {shard.device: shard.data for shard in array.addressable_shards}
        mine = [buffers[device] for device in needed if device in buffers]
        return Adopted(jax.make_array_from_single_device_arrays(shape, sharding, mine), in_place=total)
    there = sum(_volume(_overlap(box, held[device])) for device, box in needed.items() if device in held)
    if array.dtype != want.dtype:
        array = array.astype(want.dtype)
    return Adopted(jax.device_put(array, sharding), moved=total - there * itemsize, copied=total)


def _is_in_place(array: Any, sharding: Sharding, held: Mapping[Device, Box], needed: Mapping[Device, Box]) -> bool:
    return (
        isinstance(array, jax.Array)
        and _memory(array.sharding) == _memory(sharding)
        and all(held.get(device) == box for device, box in needed.items())
    )


def _memory(sharding: Sharding) -> str:
    return sharding.memory_kind or next(iter(sharding.device_set)).default_memory().kind


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Device, Box]:
    """What each device holds of an array."""
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _overlap(one: Box, other: Box) -> Box:
    return tuple((max(a, c), max(min(b, d), max(a, c))) for (a, b), (c, d) in zip(one, other, strict=True))


def _volume(box: Box) -> int:
    return math.prod(end - start for start, end in box)
