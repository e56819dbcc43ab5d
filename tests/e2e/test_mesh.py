"""The tokens of one device on every shape of the mesh, with prefix caching, chunks and preemption."""

import json
from collections.abc import Iterable

SHAPES = ((1, 2), (2, 1), (2, 2), (1, 4), (4, 2), (2, 4))

# Each line of the plan is a model and a shape. Greedy cases come several times, so that they find each other's prefixes
# and that every pool runs short; sampled ones have seeds, filters and penalties.
ON_MESHES = """
import json, sys
from pathlib import Path
from jaxllm import SamplingParams
from jaxllm.config.engine_args import engine_args
from jaxllm.engine.build import build_engine, find_model
from jaxllm.models.read_config import read_config
from jaxllm.scheduler.kv_groups import KVGroups

SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5, "logprobs": 3},
)

def run(model, data, tensor, cases, copies, length):
    args = {"model": model, "dtype": "float32", "enforce_eager": True, "max_model_len": length, "block_size": 8}
    args |= {"max_num_seqs": 4, "max_num_batched_tokens": 24}
    source = find_model(engine_args(args))
    windows = read_config(source.family, source.hf_config).kv_layout.windows
    args |= {"data_parallel_size": data, "tensor_parallel_size": tensor}
    args |= {"num_gpu_blocks_override": 1 + KVGroups(windows).num_blocks(length, 8, 24)}
    built = build_engine(engine_args(args), source)
    engine, tokens, ends = built.engine, {}, {}
    for copy in range(copies):
        for i, case in enumerate(cases):
            count = len(case["output_ids"])
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            engine.add(f"greedy {i} {copy}", case["prompt_ids"], params)
    for i, options in enumerate(SAMPLED):
        params = SamplingParams(seed=2**40 + i, max_tokens=24, ignore_eos=True, **options)
        engine.add(f"sampled {i}", cases[3]["prompt_ids"][: 20 + i], params)
    while engine.has_work:
        for update in engine.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason:
                ends[update.request_id] = update.finish_reason
        engine.scheduler.check()
    stats = engine.scheduler.stats
    built.close()
    assert set(ends.values()) == {"length"}, ends
    assert len(ends) == copies * len(cases) + len(SAMPLED)
    assert stats.num_preemptions > 0, "nobody was preempted"
    assert stats.prefix_cache_hits > 0, "no prefix was found"
    for name, found in tokens.items():
        if name.startswith("greedy"):
            expected = cases[int(name.split()[1])]["output_ids"]
            assert found == expected, (model, data, tensor, name, found, expected)
    return [tokens[f"sampled {i}"] for i in range(len(SAMPLED))]

for model, length, cases, shapes in json.loads(Path(sys.argv[1]).read_text()):
    sampled = {tuple(map(tuple, run(model, data, tensor, cases, 1 + data, length))) for data, tensor in shapes}
    assert len(sampled) == 1, (model, "sampled differently on different meshes", sampled)
    assert len({len(set(one)) for one in sampled.pop()}) > 0
    print(model, flush=True)
"""


def golden_cases(golden, name: str) -> list[dict]:
    """The cases whose contexts are short enough for a pool that runs short soon."""
    cases = json.loads((golden / name / "golden.json").read_text())["cases"]
    return [case for case in cases if len(case["prompt_ids"]) <= 64]


def check(run_program, golden, tmp_path, models: Iterable[tuple[str, Iterable[tuple[int, int]]]]) -> None:
    """Runs each model on one device and on shapes, in one process with eight devices."""
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps([
            [str(golden / name), 112, golden_cases(golden, name), [(1, 1), *shapes]]
            for name, shapes in models
        ])
    )  # fmt: skip
    said = run_program(ON_MESHES, plan, num_devices=8, timeout=900)
    assert len(said.splitlines()) == len(list(models))


def test_a_model_of_full_attention_has_the_same_tokens_on_meshes(run_program, golden, tmp_path):
    check(run_program, golden, tmp_path, [("llama", [(2, 2), (1, 4)])])
