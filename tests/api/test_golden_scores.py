"""Log-probabilities, scores, beams, weights and profiles on a golden model, through LLM as its users call it."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams, SamplingParams
from jaxllm.config.errors import InputError

BLOCK = 8


@pytest.fixture(scope="module")
def llm(golden: Path):
    options: dict[str, Any] = {"block_size": BLOCK, "max_logprobs": -1, "max_num_seqs": 8, "max_model_len": 256}
    with LLM(
        str(golden / "llama"), skip_tokenizer_init=True, num_gpu_blocks_override=256, enforce_eager=True, **options
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def cases(golden: Path) -> list[dict[str, Any]]:
    return json.loads((golden / "llama" / "golden.json").read_text())["cases"]


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **params)


def test_the_log_probability_of_each_generated_token_is_that_of_transformers(llm: LLM, cases: list[dict[str, Any]]):
    outputs = llm.generate([case["prompt_ids"] for case in cases], greedy(max_tokens=32, logprobs=3), use_tqdm=False)
    for case, output in zip(cases, outputs, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == case["output_ids"]
        assert completion.logprobs is not None
        own = [position[token] for position, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        np.testing.assert_allclose([entry.logprob for entry in own], case["logprobs"], atol=1e-4, rtol=0)
        assert {entry.rank for entry in own} == {1}
        assert completion.cumulative_logprob == pytest.approx(sum(case["logprobs"]), abs=1e-3)
        assert all([entry.rank for entry in position.values()] == [1, 2, 3] for position in completion.logprobs)
        first = sorted(log_softmax(case["logits_first"]))[-3:][::-1]
        np.testing.assert_allclose([entry.logprob for entry in completion.logprobs[0].values()], first, atol=1e-4)


def log_softmax(logits: list[float]) -> np.ndarray:
    array = np.asarray(logits, np.float64)
    return array - array.max() - math.log(np.exp(array - array.max()).sum())


def test_scores_of_given_tokens_are_those_of_transformers(llm: LLM, cases: list[dict[str, Any]]):
    prompts = [case["prompt_ids"] for case in cases]
    scores = llm.score(prompts, [case["output_ids"] for case in cases])
    for case, score in zip(cases, scores, strict=True):
        assert score.token_ids == case["output_ids"]
        np.testing.assert_allclose(score.logprobs, case["logprobs"], atol=1e-4, rtol=0)
        assert score.is_greedy
        assert score.total == pytest.approx(sum(case["logprobs"]), abs=1e-3)
    (other,) = llm.score([prompts[1]], [[(token + 1) % 100 for token in cases[1]["output_ids"]]])
    assert not other.is_greedy
    assert other.total < scores[1].total


def test_the_whole_vocabularys_log_probabilities_are_the_models(llm: LLM, cases: list[dict[str, Any]]):
    case = cases[2]
    params = greedy(max_tokens=1, logprobs=-1, flat_logprobs=True)
    (output,) = llm.generate([case["prompt_ids"]], params, use_tqdm=False)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    (position,) = logprobs
    expected = log_softmax(case["logits_first"])
    assert len(position) == len(expected) == llm.vocab_size
    found = [position[token].logprob for token in range(llm.vocab_size)]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_prompt_logprobs_are_there_for_every_token_but_the_first(llm: LLM, cases: list[dict[str, Any]]):
    case = cases[3]
    whole = case["prompt_ids"] + case["output_ids"]
    (output,) = llm.generate([whole], greedy(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(whole)
    tail = list(zip(whole, output.prompt_logprobs, strict=True))[len(case["prompt_ids"]) :]
    found = [(position or {})[token].logprob for token, position in tail]
    np.testing.assert_allclose(found, case["logprobs"], atol=1e-4)


def test_a_beam_search_finds_what_trying_everything_finds_and_its_forks_share_blocks(llm: LLM):
    prompt = [(3 + 5 * i) % 250 for i in range(4 * BLOCK)]
    width, steps = 3, 3
    beams: list[tuple[list[int], float]] = [(prompt, 0.0)]
    for _ in range(steps):  # the same search over the engine's log-probabilities of every possible token
        forks = []
        prompts = [tokens for tokens, _ in beams]
        outputs = llm.generate(prompts, greedy(max_tokens=1, logprobs=-1), use_tqdm=False)
        for (tokens, total), output in zip(beams, outputs, strict=True):
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            forks += [([*tokens, token], total + logprobs[0][token].logprob) for token in range(llm.vocab_size)]
        beams = sorted(forks, key=lambda fork: fork[1], reverse=True)[:width]
    llm.reset_prefix_cache()
    before = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    params = BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True)
    (found,) = llm.beam_search([prompt], params)
    assert [beam.tokens for beam in found.sequences] == [tokens for tokens, _ in beams]
    np.testing.assert_allclose([beam.cum_logprob for beam in found.sequences], [t for _, t in beams], atol=1e-4)
    assert [beam.finish_reason for beam in found.sequences] == ["length"] * width
    after = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    shared = after["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"]
    assert shared >= (steps - 1) * width * 3 * BLOCK  # of the prompt's blocks at least those before its last


def test_a_beam_wider_than_the_logprobs_allowed_is_refused(golden: Path):
    with (
        LLM(str(golden / "llama"), skip_tokenizer_init=True, num_gpu_blocks_override=64, enforce_eager=True) as narrow,
        pytest.raises(InputError, match="logprobs=22, more than max_logprobs 20"),
    ):
        narrow.beam_search([[1, 2]], BeamSearchParams(beam_width=11, max_tokens=2))


def test_samples_of_one_prompt_share_its_blocks_and_equal_those_asked_for_alone(llm: LLM):
    prompt = [(7 + 3 * i) % 250 for i in range(3 * BLOCK)]
    llm.reset_prefix_cache()
    params = SamplingParams(n=4, seed=11, max_tokens=6, ignore_eos=True, logprobs=0)
    (together,) = llm.generate([prompt], params, use_tqdm=False)
    alone = [
        llm.generate([prompt], SamplingParams(seed=11 + i, max_tokens=6, ignore_eos=True), use_tqdm=False)[0]
        for i in range(4)
    ]
    assert [each.token_ids for each in together.outputs] == [each.outputs[0].token_ids for each in alone]
    assert len({tuple(each.token_ids) for each in together.outputs}) > 1
    assert together.metrics.time_in_queue is not None
    assert together.metrics.time_in_queue >= 0


def test_weights_are_seen_and_replaced_and_what_is_enqueued_is_computed_again(llm: LLM, cases: list[dict[str, Any]]):
    case = cases[4]
    old = llm.apply_model(lambda weights: jax.tree.map(np.asarray, weights))
    params = greedy(max_tokens=8)

    def tokens() -> list[int]:
        return llm.generate([case["prompt_ids"]], params, use_tqdm=False)[0].outputs[0].token_ids

    assert tokens() == case["output_ids"][:8]
    llm.enqueue([case["prompt_ids"]], params)
    rotated = jax.tree.map(lambda array: np.roll(array, 1, axis=-1), old)
    try:
        llm.update_weights(rotated)
        changed = tokens()
        assert changed != case["output_ids"][:8]
        assert llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids == changed
        with pytest.raises(InputError, match="missing"):
            llm.update_weights(dict(itertools.islice(old.items(), 1)))
        assert tokens() == changed
    finally:
        llm.update_weights(old)
    assert tokens() == case["output_ids"][:8]


def test_a_function_that_looks_at_the_weights_may_call_back(llm: LLM):
    (output,) = llm.apply_model(lambda weights: llm.generate([[1, 2]], greedy(max_tokens=1), use_tqdm=False))
    assert output.finished


def test_a_profile_is_written_and_misuse_is_told(llm: LLM, tmp_path: Path):
    with pytest.raises(InputError, match="stop_profile"):
        llm.stop_profile()
    llm.start_profile(str(tmp_path))
    with pytest.raises(InputError, match="start_profile"):
        llm.start_profile(str(tmp_path))
    llm.generate([[1, 2, 3]], greedy(max_tokens=1), use_tqdm=False)
    llm.stop_profile()
    assert list(tmp_path.rglob("*.xplane.pb"))
