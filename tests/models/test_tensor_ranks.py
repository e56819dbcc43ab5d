"""Every kind of parameter split over tensor ranks gives the logits of one device."""

import json

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

folder, ranks, prompt = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
args = engine_args({"model": folder, "enforce_eager": True, "num_gpu_blocks_override": 64, "max_num_seqs": 2})
found = []
for tensor in ranks:
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
    found.append(built.runner.logits(PackedStep(shape, packed))[0, : len(prompt)].tolist())
    built.close()
print(json.dumps(found))
"""


def logits(run_program, folder, ranks, prompt):
    """Those of each number of ranks."""
    printed = run_program(LOGITS, folder, list(ranks), prompt, num_devices=max(ranks))
    return [np.asarray(found) for found in json.loads(printed)]


@pytest.mark.slow
def test_a_norm_over_all_heads_adds_up_the_squares_of_both_ranks(golden, run_program):
    case = json.loads((golden / "olmo2" / "golden.json").read_text())["cases"][3]
    (found,) = logits(run_program, golden / "olmo2", [2], case["prompt_ids"])
    np.testing.assert_allclose(found[-1], case["logits_first"], atol=1e-3, rtol=0)


# Norms of each head and biases; a plain MLP with biases; fused tensors; part of each head turned.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["cohere", "starcoder2", "glm4", "phi4_mini"])
def test_two_ranks_give_the_logits_of_one_device(tmp_path, make_golden, random_checkpoint, run_program, name):
    random_checkpoint(tmp_path, name)
    prompt = make_golden.random_prompts(320)[3]
    one, two = logits(run_program, tmp_path, [1, 2], prompt)
    np.testing.assert_allclose(two, one, atol=1e-3, rtol=0)


# SmolLM2's heads; more ranks than KV heads, with a norm over all of them; and a vocabulary that does not divide.
@pytest.mark.slow
@pytest.mark.parametrize(("heads", "architecture"), [((9, 3), "Llama"), ((14, 2), "Olmo2")])
def test_heads_that_do_not_divide_give_the_logits_of_one_device(
    tmp_path, make_golden, random_checkpoint, run_program, monkeypatch, heads, architecture
):
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True)) | {
        "num_hidden_layers": 2,
        "vocab_size": 322,
    }
    config = make_golden.CONFIGS["falcon3"] | sizes | {"architectures": [f"{architecture}ForCausalLM"]}
    monkeypatch.setitem(make_golden.CONFIGS, "uneven", config)
    random_checkpoint(tmp_path, "uneven")
    one, four = logits(run_program, tmp_path, [1, 4], make_golden.random_prompts(320)[2])
    np.testing.assert_allclose(four, one, atol=1e-3, rtol=0)
