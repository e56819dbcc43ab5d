"""A parameter's shards on this process's devices, filled chunk by chunk. Knows devices; no model and no checkpoint.

All devices' shards are one array of their own, split over its first axis: so one program updates them all, compiled
once, whatever the parameter's sharding is and whoever else is in its mesh.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxlib._jax import Device

_AXIS = "device"


class DeviceTables:
    """Zeros of a shard's shape on each device, to be filled with tables of lanes and columns, layer by layer.

    With `num_inputs`, so many axes (the layers not counted) stand before the lanes, and chunks are transposed: by the
    device, or on a CPU on the way to it, which takes half the time. None for a parameter whose lanes come first.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: jnp.dtype,
        devices: Sequence[Device],
        stacked: bool,
        num_inputs: int | None,
    ):
        self._mesh = Mesh(np.asarray(devices), (_AXIS,))
        self._sharding = NamedSharding(self._mesh, PartitionSpec(_AXIS))
        self._turned = num_inputs is not None and devices[0].platform == "cpu"
        self._update = _update(self._mesh, stacked, num_inputs, self._turned)
        self._array = _zeros((len(devices) * shape[0], *shape[1:]), dtype, self._sharding)()

    def place(self, chunks: Sequence[np.ndarray], layer: int, lane: int) -> None:
        """Starts to write each device's chunk [lanes, columns], from a lane on.

        Returns when the chunks before are in their places, so that at most these and those are held.
        """
        chunks = [chunk.T if self._turned else chunk for chunk in chunks]
        shape = (len(chunks) * chunks[0].shape[0], chunks[0].shape[1])
        placed = jax.device_put(chunks, list(self._mesh.devices.flat))
        chunk = jax.make_array_from_single_device_arrays(shape, self._sharding, placed)
        jax.block_until_ready(self._array)
        self._array = self._update(self._array, chunk, np.int32(layer), np.int32(lane))

    def finish(self, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
        """Gives the parameter: the shards stay where they are."""
        shards = [shard.data for shard in jax.block_until_ready(self._array).addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.cache
def _update(mesh: Mesh, stacked: bool, num_inputs: int | None, turned: bool):
    def update(array, chunk, layer, lane):
        shape = array.shape if stacked else (1, *array.shape)
        first = 1 + (1 if num_inputs is None else num_inputs)
        table = array.reshape(shape[0], math.prod(shape[1:first]), math.prod(shape[first:]))
        none = np.int32(0)  # a plain 0 is of 64 bits where the caller has set jax so
        place = (layer, lane, none) if num_inputs is None else (layer, none, lane)
        chunk = (chunk if num_inputs is None or turned else chunk.T).astype(array.dtype)
        return jax.lax.dynamic_update_slice(table, chunk[None], place).reshape(array.shape)

    split, whole = PartitionSpec(_AXIS), PartitionSpec()
    mapped = jax.shard_map(update, mesh=mesh, in_specs=(split, split, whole, whole), out_specs=split, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding):
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
