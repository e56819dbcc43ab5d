"""What the launcher hands on to be compiled, with a stand-in for what compiles: no GPU, no Triton."""

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm.kernels.launch import launch, poisoned_results

CACHE = jax.ShapeDtypeStruct((4, 2), jnp.float32)
FRESH = jax.ShapeDtypeStruct((3,), jnp.bfloat16)


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def call(
        kernel: Any, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct], *about: Any, **options: Any
    ) -> list[jax.Array]:
        grid, aliases, constants = about
        made.append({"operands": operands, "results": results, "grid": grid, "aliases": aliases, **constants})
        return [jnp.zeros(each.shape, each.dtype) for each in results]

    monkeypatch.setitem(sys.modules, "jaxllm.kernels.triton_call", SimpleNamespace(call=call))
    return made


@pytest.mark.parametrize("order", [(CACHE, FRESH), (FRESH, CACHE)])
def test_results_in_place_come_last_for_the_launcher_and_back_in_their_order(calls, order):
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="write"))
    cache = jnp.zeros(CACHE.shape)
    results = launch(kernel, cache, 7, results=order, grid=2, aliases={0: order.index(CACHE)}, K=3)
    assert [result.shape for result in results] == [each.shape for each in order]
    (call,) = calls
    assert call["results"] == [FRESH, CACHE]
    assert call["aliases"] == {0: 1}
    assert (call["operands"][1], call["grid"], call["K"]) == (7, 2, 3)


def test_poisoned_results_are_operands_in_place(calls):
    kernel = SimpleNamespace(fn=SimpleNamespace(__name__="write"))
    with poisoned_results():
        launch(kernel, jnp.zeros(CACHE.shape), results=(CACHE, FRESH), grid=1, aliases={0: 0})
    (call,) = calls
    assert call["aliases"] == {0: 0, 1: 1}
    assert jnp.isnan(call["operands"][1]).all()
