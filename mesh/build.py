"""Devices -> a jax Mesh with the axes (data, tensor). Knows no models."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxlib._jax import Device

AXIS_NAMES = ("data", "tensor")


def build_mesh(data: int = 1, tensor: int = 1, devices: Sequence[Device] | None = None) -> Mesh:
    """Lays the first data x tensor devices out as a mesh; ranks of one tensor group are neighbours.

    Raises:
        ValueError: there are fewer devices than the mesh has places.
    """
    devices = list(jax.devices() if devices is None else devices)
    if data < 1 or tensor < 1:
        raise ValueError(f"a mesh needs at least one place on each axis, got data={data}, tensor={tensor}")
    if len(devices) < data * tensor:
        raise ValueError(f"a {data}x{tensor} mesh (data x tensor) needs {data * tensor} devices, found {len(devices)}")
    return Mesh(np.asarray(devices[: data * tensor]).reshape(data, tensor), AXIS_NAMES)
