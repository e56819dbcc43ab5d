import dataclasses

import pytest
from jax.sharding import PartitionSpec

from jaxllm.mesh.axes import AxisRules


def test_each_logical_axis_becomes_its_mesh_axis_in_order():
    rules = AxisRules()
    assert rules.spec("embed", "kv_heads", None, "head_dim") == PartitionSpec(None, "tensor", None, None)
    assert rules.spec("layers", "kv_blocks", None, "kv_heads", None, "head_dim") == PartitionSpec(
        None, "data", None, "tensor", None, None
    )
    assert rules.spec() == PartitionSpec()


def test_changing_the_table_changes_the_specs():
    rules = dataclasses.replace(AxisRules(), vocab="tensor", ffn=None)
    assert rules.spec("vocab", "embed") == PartitionSpec("tensor", None)
    assert rules.spec("ffn") == PartitionSpec(None)


def test_two_axes_over_one_mesh_axis_are_refused():
    with pytest.raises(
        ValueError, match=r"\('q_heads', 'ffn'\) would split one mesh axis twice: \['tensor', 'tensor'\]"
    ):
        AxisRules().spec("q_heads", "ffn")


def test_an_unknown_logical_axis_is_an_error():
    with pytest.raises(AttributeError, match="heads"):
        AxisRules().spec("heads")
