"""The tokens of one device on every shape of the mesh, with prefix caching, chunks and preemption."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 2), (2, 4))

# A run is a model on one shape. Greedy cases come several times, so that they find each other's prefixes and that every
# pool runs short; sampled ones have seeds, filters and penalties. Most of the time is compiling: hence two rows.
ON_MESHES = """
import json, sys
from pathlib import Path
from jaxllm import SamplingParams
from jaxllm.config.engine_args import engine_args
from jaxllm.engine.build import build_engine
from jaxllm.engine.model_source import find_model
from jaxllm.models.read_config import read_config
from jaxllm.scheduler.kv_groups import KVGroups

SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 3},
)

def run(model, data, tensor, cases, length, with_sampled):
    args = {"model": model, "dtype": "float32", "enforce_eager": True, "max_model_len": length, "block_size": 8}
    args |= {"max_num_seqs": 2, "max_num_batched_tokens": 24}
    source = find_model(engine_args(args))
    windows = read_config(source.family, source.hf_config).kv_layout.windows
    args |= {"data_parallel_size": data, "tensor_parallel_size": tensor}
    args |= {"num_gpu_blocks_override": 1 + KVGroups(windows).num_blocks(length, 8, 24)}
    built = build_engine(engine_args(args), source)
    engine, tokens, ends = built.engine, {}, {}
    copies = 1 + data
    sampling = SAMPLED if with_sampled else ()
    for i, case in enumerate(cases):
        for copy in range(copies):
            count = len(case["output_ids"])
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            engine.add(f"greedy {i} {copy}", case["prompt_ids"], params)
    for i, options in enumerate(sampling):
        params = SamplingParams(seed=2**40 + i, max_tokens=24, ignore_eos=True, **options)
        engine.add(f"sampled {i}", cases[-1]["prompt_ids"][: 20 + i], params)
    while engine.has_work:
        for update in engine.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason:
                ends[update.request_id] = update.finish_reason
        engine.scheduler.check()
    stats = engine.scheduler.stats
    built.close()
    assert set(ends.values()) == {"length"}, ends
    assert len(ends) == copies * len(cases) + len(sampling)
    assert stats.num_preemptions > 0, "nobody was preempted"
    assert stats.prefix_cache_hits > 0, "no prefix was found"
    for name, found in tokens.items():
        if name.startswith("greedy"):
            expected = cases[int(name.split()[1])]["output_ids"]
            assert found == expected, (model, data, tensor, name, found, expected)
    return [tokens[f"sampled {i}"] for i in range(len(sampling))]

for model, length, cases, shapes, with_sampled in json.loads(Path(sys.argv[1]).read_text()):
    sampled = [run(model, data, tensor, cases, length, with_sampled) for data, tensor in shapes]
    assert all(one == sampled[0] for one in sampled), (model, "sampled differently on different meshes", sampled)
    assert not with_sampled or len({token for one in sampled[0] for token in one}) > 20
    print(model, flush=True)
"""


FAMILIES = sorted(file.parent.name for file in GOLDEN.glob("*/golden.json"))
# One for each way in which layers differ: norms, biases, windows, layers side by side, ropes.
KINDS = ("cohere", "gemma2", "olmo2", "phi4_mini", "qwen2", "qwen3", "starcoder2")
# Their ropes depend on the longest context of the run, up to which the goldens hold.
LENGTHS = {"phi4_mini": 48, "llama_dynamic": 64}


class Run(NamedTuple):
    """A model, the longest context, cases, shapes, and whether there are sampled requests too."""

    model: str
    length: int
    cases: list[dict]
    shapes: Sequence[tuple[int, int]]
    with_sampled: bool = False


def golden(family: str, shapes: Sequence[tuple[int, int]], with_sampled: bool = False) -> Run:
    """The cases of a golden whose contexts are short enough for a pool that runs short soon."""
    length = LENGTHS.get(family, 112)
    cases = json.loads((GOLDEN / family / "golden.json").read_text())["cases"]
    cases = [case for case in cases if len(case["prompt_ids"]) + len(case["output_ids"]) <= length]
    return Run(str(GOLDEN / family), length, cases, shapes, with_sampled)


def packaged(shapes: Sequence[tuple[int, int]]) -> Run:
    """SmolLM2, of whose nine query and three KV heads no even number of ranks has equal shares."""
    results = json.loads((GOLDEN / "real" / "smollm2.json").read_text())["results"]
    cases = [{"prompt_ids": r["prompt_ids"], "output_ids": r["output_ids"][:16]} for r in results[:3]]
    return Run("smollm2", 64, [case for case in cases if len(case["prompt_ids"]) <= 64], shapes)


def check(run_program, tmp_path, runs: Sequence[Run]) -> None:
    """Makes all runs in one process with eight devices."""
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(runs))
    said = run_program(ON_MESHES, plan, num_devices=8, timeout=1800)
    assert len(said.splitlines()) == len(runs)


def test_a_model_has_the_tokens_of_one_device_on_a_mesh(run_program, tmp_path):
    check(run_program, tmp_path, [golden("llama", [(2, 2)])])


@pytest.mark.slow
def test_greedy_and_sampled_tokens_are_those_of_one_device_on_large_meshes(run_program, tmp_path):
    check(run_program, tmp_path, [golden("llama", [(1, 1), (2, 4), (4, 2)], True), golden("gemma3_text", [(1, 4)])])


@pytest.mark.slow
def test_families_of_every_kind_of_layer_have_the_tokens_of_one_device_on_a_mesh(run_program, tmp_path):
    check(run_program, tmp_path, [golden(family, [SHAPES[i % len(SHAPES)]]) for i, family in enumerate(KINDS)])


@pytest.mark.slow
def test_smollm2_has_the_tokens_of_one_device_on_a_mesh(run_program, tmp_path):
    check(run_program, tmp_path, [packaged([(1, 4)])])
