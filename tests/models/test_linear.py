"""When a product takes its norm and its residual along, seen from what is called while it is traced."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from jaxllm.kernels.all_reduce.reference import all_reduce
from jaxllm.kernels.select import select
from jaxllm.models.linear import Residual, linear_add
from jaxllm.models.norms import NoNorm
from jaxllm.models.parameters import LayerMatrix
from jaxllm.models.step_context import Kernels

KERNELS = Kernels(*(select(name, platform="cpu") for name in Kernels._fields))


def added(num_ranks, bias=None, residual=True, scale=1.0, stacked=True):
    """Which kernels a product of 8 tokens with its residual calls on so many tensor ranks."""
    calls = []

    def add(x, weight, residual, *, stack):
        calls.append("linear" if residual is None else "linear_add")
        return x @ weight if residual is None else residual + x @ weight

    def add_ranks(part, residual=None):
        calls.append("all_reduce" if residual is None else "all_reduce_add")
        return all_reduce(part, residual)

    def add_over_ranks(x, weight, residual, *, stack):
        calls.append("linear_all_reduce")
        return all_reduce(x @ weight, residual)

    def run(x_TD):
        weight = jnp.zeros((3, 4, 2, 16))
        param = nnx.Param(LayerMatrix(weight[1], weight, 1, KERNELS.matmul) if stacked else weight[1])
        after = Residual(x_TD, NoNorm(), scale) if residual else None
        x_TNH = jnp.zeros((8, 4, 2))
        kernels = KERNELS._replace(linear_add=add, all_reduce=add_ranks, linear_all_reduce=add_over_ranks)
        return linear_add("TNH,NHD->TD", x_TNH, param, bias, after, kernels)

    mesh, whole = AbstractMesh((num_ranks,), ("tensor",)), PartitionSpec()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    out = jax.eval_shape(mapped, jax.ShapeDtypeStruct((8, 16), jnp.float32))
    assert out.shape == (8, 16)
    return calls


def test_one_rank_adds_the_residual_in_the_kernel():
    assert added(1) == ["linear_add"]


def test_several_ranks_add_it_once_with_their_sum():
    assert added(2) == ["linear_all_reduce"]
    assert added(2, stacked=False) == ["all_reduce_add"]


@pytest.mark.parametrize("other", [{"residual": False}, {"scale": 0.5}, {"bias": jnp.zeros(16)}])
def test_what_stands_between_product_and_residual_keeps_them_apart(other):
    assert added(1, **other) == ["linear"]
    assert added(2, **other) == (["linear", "all_reduce"] if other.get("residual", True) else ["linear"])


def test_a_matrix_that_is_an_array_of_its_own_is_multiplied_by_xla():
    assert added(1, stacked=False) == []
