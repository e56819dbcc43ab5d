"""Every kind of parameter split over tensor ranks gives the logits of one device."""

import json
from typing import NamedTuple

import numpy as np
import pytest

LOGITS = """
import json, sys
from pathlib import Path
import numpy as np
from jaxllm.config.engine_args import engine_args
from jaxllm.engine.build import build_engine
from jaxllm.engine.model_source import find_model
from jaxllm.engine.input_builder import PackedStep
from jaxllm.engine.step_inputs import host_views, packed_size
from jaxllm.mesh.build import build_mesh

def logits(folder, tensor, prompt):
    args = engine_args({"model": folder, "enforce_eager": True, "num_gpu_blocks_override": 64, "max_num_seqs": 2})
    built = build_engine(args, find_model(args), mesh=build_mesh(1, tensor))
    groups, width = built.runner.program.num_groups, -(-len(prompt) // 16)
    shape = built.buckets.shape(len(prompt), 1, width, "greedy")
    packed = np.zeros((1, packed_size(shape, groups)), np.int32)
    inputs = host_views(packed[0], shape, groups)
    inputs.token[: len(prompt)], inputs.position[:] = prompt, -1
    inputs.position[: len(prompt)] = range(len(prompt))
    inputs.query_start[1:], inputs.context_len[0] = len(prompt), len(prompt)
    for group in range(groups):
        inputs.block_table[group, 0, :width] = 1 + group * width + np.arange(width)
    told = built.runner.logits(PackedStep(shape, packed))[0, : len(prompt)].tolist()
    built.close()
    return told

for folder, ranks, prompt in json.loads(Path(sys.argv[1]).read_text()):
    print(json.dumps([logits(folder, tensor, prompt) for tensor in ranks]))
"""


class Case(NamedTuple):
    """A model's folder, numbers of ranks, and a prompt."""

    folder: str
    ranks: tuple[int, ...]
    prompt: list[int]


# Norms of each head and biases; a plain MLP with biases; fused tensors; part of each head turned.
KINDS = ("cohere", "starcoder2", "glm4", "phi4_mini")
# SmolLM2's heads; more ranks than KV heads, with a norm over all of them; and a vocabulary that does not divide.
UNEVEN = {"Llama": (9, 3), "Olmo2": (14, 2)}


@pytest.fixture(scope="module")
def olmo2(golden) -> dict:
    """A golden case of the family that normalises all heads together."""
    return json.loads((golden / "olmo2" / "golden.json").read_text())["cases"][3]


@pytest.fixture(scope="module")
def logits(tmp_path_factory, golden, olmo2, make_golden, random_checkpoint, run_program) -> dict[str, list[np.ndarray]]:
    """By case, those of each number of ranks: all from one process, since a start takes as long as two cases."""
    cases = {"norm": Case(str(golden / "olmo2"), (2,), olmo2["prompt_ids"])}
    for name in KINDS:
        random_checkpoint(folder := tmp_path_factory.mktemp(name), name)
        cases[name] = Case(str(folder), (1, 2), make_golden.random_prompts(320)[3])
    for architecture, heads in UNEVEN.items():
        sizes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True)) | {
            "num_hidden_layers": 2,
            "vocab_size": 322,
        }
        config = make_golden.CONFIGS["falcon3"] | sizes | {"architectures": [f"{architecture}ForCausalLM"]}
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(make_golden.CONFIGS, "uneven", config)
            random_checkpoint(folder := tmp_path_factory.mktemp("uneven"), "uneven")
        cases[architecture] = Case(str(folder), (1, 4), make_golden.random_prompts(320)[2])
    plan = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.write_text(json.dumps([*cases.values()]))
    lines = run_program(LOGITS, plan, num_devices=4, timeout=400).splitlines()
    return {name: [np.asarray(each) for each in json.loads(line)] for name, line in zip(cases, lines, strict=True)}


@pytest.mark.slow
def test_a_norm_over_all_heads_adds_up_the_squares_of_both_ranks(logits, olmo2):
    (found,) = logits["norm"]
    np.testing.assert_allclose(found[-1], olmo2["logits_first"], atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_give_the_logits_of_one_device(logits, name):
    one, two = logits[name]
    np.testing.assert_allclose(two, one, atol=1e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", UNEVEN)
def test_heads_that_do_not_divide_give_the_logits_of_one_device(logits, architecture):
    one, four = logits[architecture]
    np.testing.assert_allclose(four, one, atol=1e-3, rtol=0)
