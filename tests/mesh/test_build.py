from dataclasses import dataclass

import jax
import pytest

from jaxllm.mesh.build import AXIS_NAMES, build_mesh


@dataclass(frozen=True)
class FakeDevice:
    """Stands in for a device: a mesh only lays it out."""

    id: int
    platform: str = "gpu"
    process_index: int = 0


def fake_devices(count):
    return [FakeDevice(i) for i in range(count)]


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 2), (4, 1), (2, 3)])
def test_the_mesh_has_the_sizes_asked_for_and_takes_the_first_devices(data, tensor):
    mesh = build_mesh(data, tensor, fake_devices(7))
    assert mesh.axis_names == AXIS_NAMES == ("data", "tensor")
    assert dict(mesh.shape) == {"data": data, "tensor": tensor}
    # Neighbours share a tensor group.
    assert [[d.id for d in row] for row in mesh.devices] == [
        list(range(r * tensor, (r + 1) * tensor)) for r in range(data)
    ]


def test_the_default_is_the_first_device_alone():
    assert build_mesh().devices.tolist() == [[jax.devices()[0]]]


def test_too_few_devices_are_counted():
    with pytest.raises(ValueError, match=r"a 2x4 mesh \(data x tensor\) needs 8 devices, found 5"):
        build_mesh(2, 4, fake_devices(5))


@pytest.mark.parametrize(("data", "tensor"), [(0, 1), (1, 0), (-1, -1)])
def test_an_axis_without_places_is_refused(data, tensor):
    with pytest.raises(ValueError, match=f"at least one place on each axis, got data={data}, tensor={tensor}"):
        build_mesh(data, tensor, fake_devices(4))


COLLECTIVES = """
import jax, jax.numpy as jnp
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
mesh = build_mesh(2, 2)
spec, out_spec = AxisRules().spec("kv_blocks", "kv_heads"), AxisRules().spec("batch")
x = jnp.arange(16).reshape(4, 4)
summed = jax.shard_map(lambda x: jax.lax.psum(x, "tensor"), mesh=mesh, in_specs=spec, out_specs=out_spec)
assert (summed(x) == x[:, :2] + x[:, 2:]).all(), summed(x)
print(len(jax.devices()), "ok")
"""


def test_a_2x2_mesh_sums_over_its_tensor_axis(run_program):
    assert run_program(COLLECTIVES, num_devices=4) == "4 ok\n"
