import re
from dataclasses import dataclass

import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.caller import CallersAxes, callers_axes, engine_mesh


@dataclass(frozen=True)
class FakeDevice:
    """Stands in for a device: a mesh only lays it out."""

    id: int
    platform: str = "gpu"
    process_index: int = 0


RULES = AxisRules(batch="fsdp", kv_blocks="fsdp", q_heads="tp", kv_heads="tp", ffn="tp", vocab="tp")


def mesh_of(**sizes: int) -> Mesh:
    devices = [FakeDevice(i) for i in range(int(np.prod(list(sizes.values()))))]
    return Mesh(np.asarray(devices).reshape(*sizes.values()), tuple(sizes))


def ids(mesh: Mesh) -> list:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def test_the_callers_axes_come_in_the_engines_order_and_others_follow():
    mesh = mesh_of(tp=2, expert=2, fsdp=3)
    axes = callers_axes(mesh, RULES)
    assert axes == CallersAxes(("fsdp",), ("tp",))
    own = engine_mesh(mesh, axes)
    assert dict(own.shape) == {"data": 3, "tensor": 2, "expert": 2}
    assert ids(own) == np.arange(12).reshape(2, 2, 3).transpose(2, 0, 1).tolist()


def test_several_axes_make_one_in_their_order():
    mesh = mesh_of(fsdp=2, tp=2, replica=2)
    rules = AxisRules(("replica", "fsdp"), ("replica", "fsdp"), "tp", "tp", "tp", vocab=("tp",))
    own = engine_mesh(mesh, callers_axes(mesh, rules))
    assert dict(own.shape) == {"data": 4, "tensor": 2}
    assert ids(own) == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_without_a_table_the_axes_of_the_engines_names_are_meant_and_a_missing_one_has_size_1():
    own = engine_mesh(*both(mesh_of(tensor=2, stage=2)))
    assert (dict(own.shape), ids(own)) == ({"data": 1, "tensor": 2, "stage": 2}, [[[0, 1], [2, 3]]])
    assert dict(engine_mesh(*both(mesh_of(data=2))).shape) == {"data": 2, "tensor": 1}


def both(mesh: Mesh) -> tuple[Mesh, CallersAxes]:
    return mesh, callers_axes(mesh)


def test_an_axis_that_only_happens_to_be_called_as_the_engines_is_left_alone():
    mesh = mesh_of(data=2, fsdp=2, tp=2)
    own = engine_mesh(mesh, callers_axes(mesh, RULES))
    assert dict(own.shape) == {"data": 2, "tensor": 2, "data_": 2}
    assert ids(own) == [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]


def test_a_spec_is_said_in_the_callers_names():
    axes = CallersAxes(("replica", "fsdp"), ("tp",))
    assert axes.spec(PartitionSpec("data", None, "tensor")) == PartitionSpec(("replica", "fsdp"), None, "tp")
    assert CallersAxes((), ("tp",)).spec(PartitionSpec(("data", "tensor"), "data")) == PartitionSpec("tp", None)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (None, "the mesh has the axes fsdp, tp, neither data nor tensor: say which are which with axis_rules="),
        (AxisRules(batch="fsdp", kv_blocks="fsdp", ffn="tp"), "q_heads='tensor', ffn='tp' differ"),
        (AxisRules("fsdp", "tp", "tp", "tp", "tp", "tp"), "batch='fsdp', kv_blocks='tp' differ"),
        (
            AxisRules("dp", "dp", "tp", "tp", "tp", "tp"),
            "split over 'dp', but the mesh has the axes fsdp, tp: name one",
        ),
        (AxisRules("tp", "tp", "tp", "tp", "tp", "tp"), "'tp' would split both the batch and the heads"),
        (AxisRules("fsdp", "fsdp", "tp", "tp", "tp", "tp", embed="fsdp"), "the engine keeps embed whole"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line(rules, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        callers_axes(mesh_of(fsdp=2, tp=2), rules)
    assert "\n" not in str(caught.value)


def test_anything_but_a_mesh_is_refused():
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh, got tuple"):
        callers_axes((2, 2))  # pyright: ignore[reportArgumentType]


CONTEXTS = """
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxllm.mesh.adopt import adopt
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.caller import callers_axes, engine_mesh, without_callers_mesh

grid = np.asarray(jax.devices()).reshape(2, 2)
rules = AxisRules("fsdp", "fsdp", "tp", "tp", "tp", "tp")

def pointers(array):
    return {shard.device: shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}

def want(spec, dtype=np.float32, shape=(8, 8)):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(own, spec))

for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = Mesh(grid, ("tp", "fsdp"), axis_types=(kind, kind))  # the engine's has another order of devices
    axes = callers_axes(mesh, rules)
    own = engine_mesh(mesh, axes)
    numbers = np.arange(64, dtype=np.float32).reshape(8, 8)
    put = lambda *spec: jax.device_put(numbers, NamedSharding(mesh, P(*spec)))
    summed = jax.jit(jax.shard_map(
        lambda x: jax.lax.psum(x.sum(), "tensor"), mesh=own, in_specs=P(None, "tensor"), out_specs=P(), check_vma=False
    ))
    given = {"whole": put(), "split": put(None, "tp"), "rows": put("fsdp"), "both": put("fsdp", "tp"), "host": numbers}
    wanted = {
        "whole": want(P()),
        "split": want(P(None, "tensor")),
        "rows": want(P("tensor")),  # each device holds half of it, or nothing
        "both": want(P(None, "tensor")),  # half of it is there
        "host": want(P("tensor")),
    }
    with jax.set_mesh(mesh):
        before = jax.sharding.get_abstract_mesh()
        with without_callers_mesh():
            found = adopt(given, wanted)
            half = adopt(put("fsdp", "tp"), want(P(), jnp.bfloat16))
            print(float(summed(found.tree["split"])))
        assert jax.sharding.get_abstract_mesh() == before
    for name, array in found.tree.items():
        assert array.sharding == wanted[name].sharding and (np.asarray(array) == numbers).all(), name
        if name in ("whole", "split"):
            assert pointers(array) == pointers(given[name]), name
    print(found.in_place, found.copied, found.moved)
    assert half.tree.dtype == jnp.bfloat16 and (half.in_place, half.copied, half.moved) == (0, 512, 512 - 128)
assert type(without_callers_mesh()).__name__ == "nullcontext"
"""


def test_arrays_are_used_in_place_or_copied_once_on_either_kind_of_mesh(run_program):
    # whole: 4 x 256 bytes and split: 4 x 128 stay. rows: of four slices two are there; both: half of four; host: none.
    counts = f"{4 * 256 + 4 * 128} {3 * 4 * 128} {2 * 128 + 4 * 64 + 4 * 128}"
    assert run_program(CONTEXTS, num_devices=4).splitlines() == ["2016.0", counts] * 2
