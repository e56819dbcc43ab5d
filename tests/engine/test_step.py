"""What the tensor and data ranks of a step exchange: counted in the compiled programs of several meshes."""

import json

import pytest

COLLECTIVES = """
import json, sys
from jaxllm.bench.collectives import collectives
from jaxllm.config.engine_args import engine_args
from jaxllm.engine.buckets import StepShape
from jaxllm.engine.model_source import find_model
from jaxllm.engine.step import StepProgram
from jaxllm.engine.step_compiler import compile_step
from jaxllm.kernels.select import select
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
from jaxllm.models.forward import build_program
from jaxllm.models.step_context import Kernels

kernels = Kernels(*(select(name, platform="cpu") for name in Kernels._fields))
for model, meshes in json.loads(sys.argv[2]):
    source = find_model(engine_args({"model": f"{sys.argv[1]}/{model}"}))
    decoder = build_program(source.family.configure(source.hf_config))
    for data, tensor, num_tokens, num_requests in meshes:
        program = StepProgram(decoder, kernels, build_mesh(data, tensor), AxisRules(), 16)
        compiled = compile_step(program, StepShape(num_tokens, num_requests, 8, "greedy"), 8, 16)
        print(json.dumps(collectives(compiled.as_text(), program.mesh.shape)))
"""
DECODE, MIXED = (4, 4), (32, 16)  # tokens, requests


def collectives_of(run_program, golden, wanted):
    told = run_program(COLLECTIVES, golden, json.dumps(wanted), num_devices=4)
    return [[tuple(map(tuple_of, each)) for each in json.loads(line)] for line in told.splitlines()]


def tuple_of(value):
    return tuple(value) if isinstance(value, list) else value


def split_step(num_tokens, num_requests, num_all_reduces, ranks=2, d_model=64):
    """What a float32 step over tensor ranks may exchange: features of all tokens, and the best token of each rank."""
    features, best = 4 * num_tokens * d_model, 4 * 2 * ranks * num_requests
    return [("all-gather", ("tensor",), best, 1), ("all-reduce", ("tensor",), features, num_all_reduces)]


def test_a_step_sums_twice_a_layer_over_tensor_ranks_and_nothing_over_data_ranks(golden, run_program):
    meshes = [(data, tensor, *shape) for data, tensor in ((1, 2), (2, 2), (4, 1)) for shape in (DECODE, MIXED)]
    found = collectives_of(run_program, golden, [("llama", meshes)])
    embedding_and_layers = 1 + 2 * 4
    split = [split_step(*DECODE, embedding_and_layers), split_step(*MIXED, embedding_and_layers)]
    assert found == [*split, *split, [], []]


@pytest.mark.slow
def test_side_by_side_sub_layers_share_a_sum_and_a_norm_over_all_heads_has_its_own(golden, run_program):
    mesh = (2, 2, *DECODE)
    found = collectives_of(run_program, golden, [("cohere", [mesh]), ("olmo2", [mesh])])
    squares = ("all-reduce", ("tensor",), 2 * 4 * DECODE[0], 4)  # of the queries and of the keys, which XLA joins
    best, sums = split_step(*DECODE, 1 + 2 * 4)
    assert found == [split_step(*DECODE, 1 + 4), [best, squares, sums]]
