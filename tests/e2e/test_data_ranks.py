"""Requests spread over data ranks get the tokens of one device, whatever meets on a rank."""

import json

import pytest

PROGRAM = """
import json, sys
from pathlib import Path
import jax
from jaxllm import SamplingParams
from jaxllm.config.engine_args import engine_args
from jaxllm.engine.build import build_engine
from jaxllm.engine.model_source import find_model
from jaxllm.engine.loop import read_stats
from jaxllm.mesh.build import build_mesh

folder = Path(sys.argv[1])
prompts = [case["prompt_ids"] for case in json.loads((folder / "golden.json").read_text())["cases"]]
longest = max(prompts, key=len)
PLAIN = [{"temperature": 0.0}, {"seed": 7}]
RICH = {"seed": 8, "top_k": 20, "frequency_penalty": 0.5, "logprobs": 2, "prompt_logprobs": 1}
KINDS = PLAIN if sys.argv[3] == "plain" else [*PLAIN, RICH]
LATE = {5: longest + prompts[0], 9: longest + prompts[1]}  # their beginning is cached by then, on one rank

def run(ranks):
    args = engine_args(
        {
            "model": str(folder),
            "enforce_eager": True,
            "data_parallel_size": ranks,
            "num_gpu_blocks_override": 9 if ranks < 4 else 8,
            "max_model_len": 112,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 24,
        }
    )
    built = build_engine(args, find_model(args), mesh=build_mesh(ranks, 1, jax.devices()[:ranks]))
    engine, tokens, scores = built.engine, {}, {}
    # Few shapes are compiled, which takes most of the time. Every one of them asks a sampler.
    engine._builder._choose = lambda shape: shape._replace(
        num_tokens=4 if shape.program == "decode" else 24,
        num_requests=4,
        variant="hidden" if shape.variant == "hidden" else "logits",
    )

    def add(name, prompt, number):
        kind, n = KINDS[number % len(KINDS)], 1 + 2 * (number == 1)
        engine.add(name, prompt, SamplingParams(max_tokens=12 + 5 * (number % 5), ignore_eos=True, n=n, **kind))

    for number in range(12):
        add(f"r{number}", prompts[number % len(prompts)][:60], number)
    step = 0
    while engine.has_work:
        step += 1
        if step in LATE:
            add(f"late{step}", LATE[step][:70], step - 5)
        if step == 7:
            engine.abort("r10")
        for update in engine.step():
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
            if update.scores is not None:
                told = [*update.scores.tokens, *(update.scores.prompt or ())]
                scores.setdefault(update.request_id, []).extend(one.token_ids for one in told if one)
        engine.scheduler.check()
    stats = read_stats(engine)
    built.close()
    tokens.pop("r10", None)
    ranks = [[one.num_step_tokens, one.num_preemptions, one.prefix_cache_hits] for one in stats.ranks]
    return {"tokens": tokens, "scores": scores, "ranks": ranks}

print(json.dumps([run(ranks) for ranks in json.loads(sys.argv[2])]))
"""


def check(one, several) -> None:
    assert len(one["tokens"]) == 15
    assert several["tokens"] == one["tokens"]
    assert several["scores"] == one["scores"]
    assert all(num_tokens > 100 for num_tokens, _, _ in several["ranks"]), "a rank did nothing"
    assert sum(hits for _, _, hits in several["ranks"]) > 0


def test_two_data_ranks_give_the_tokens_of_one(golden, run_program):
    one, two = json.loads(run_program(PROGRAM, golden / "llama", [1, 2], "plain", num_devices=2, timeout=400))
    check(one, two)
    assert sum(preemptions for _, preemptions, _ in two["ranks"]) > 0


@pytest.mark.slow
def test_four_data_ranks_give_the_tokens_of_one_with_penalties_and_scores_too(golden, run_program):
    one, four = json.loads(run_program(PROGRAM, golden / "llama", [1, 4], "all", num_devices=4, timeout=400))
    check(one, four)
    assert len(one["scores"]) >= 3
