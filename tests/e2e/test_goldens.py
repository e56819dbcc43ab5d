"""The engine's greedy tokens and logits against those of transformers, in float32."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.input_builder import PackedStep
from jaxllm.engine.step_inputs import host_views, packed_size

FAMILIES = ("llama", "llama_tied", "llama_fp16_sharded", "gemma3_text")
REAL = Path(__file__).parents[1] / "golden" / "real"


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def prompt_logits(driver, prompt_ids: list[int]) -> np.ndarray:
    """Logits of the last prompt token, through the same cache and table as a step."""
    runner, buckets = driver.built.runner, driver.built.buckets
    groups = runner.program.num_groups
    num_blocks = -(-len(prompt_ids) // runner.program.block_size)
    shape = buckets.shape(len(prompt_ids), 1, num_blocks, "greedy")
    packed = np.zeros(packed_size(shape, groups), np.int32)
    inputs = host_views(packed, shape, groups)
    length = len(prompt_ids)
    inputs.token[:length] = prompt_ids
    inputs.position[:length] = range(length)
    inputs.position[length:] = -1
    inputs.query_start[1:] = length
    inputs.context_len[0] = length
    for group in range(groups):
        inputs.block_table[group, 0, :num_blocks] = 1 + group * num_blocks + np.arange(num_blocks)
    return runner.logits(PackedStep(shape, packed))[length - 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_first_logits_equal_the_goldens(family, engine_of, golden_cases):
    cases = golden_cases(family)
    with engine_of(family, max_num_seqs=8, max_num_batched_tokens=256, kv_cache_memory_bytes=8 << 20) as driver:
        for i, case in enumerate(cases):
            driver.add(str(i), case["prompt_ids"], greedy(32))
        driver.run()
        for i, case in enumerate(cases):
            assert driver.tokens[str(i)] == case["output_ids"]
            assert driver.ends[str(i)] == "length"
        for case in cases:
            logits = prompt_logits(driver, case["prompt_ids"])
            np.testing.assert_allclose(logits, case["logits_first"], atol=1e-3, rtol=0)


def check_real(llm: LLM, name: str) -> None:
    results = json.loads((REAL / f"{name}.json").read_text())["results"]
    prompts = [{"prompt_token_ids": result["prompt_ids"]} for result in results]
    for output, result in zip(llm.generate(prompts, greedy(64), use_tqdm=False), results, strict=True):
        assert output.outputs[0].token_ids == result["output_ids"]
    driver = type("Built", (), {"built": llm._built})
    for result in results:
        logits = prompt_logits(driver, result["prompt_ids"])
        top = [logits[token] for token, _ in result["first_step_top10"]]
        np.testing.assert_allclose(top, [value for _, value in result["first_step_top10"]], atol=1e-3, rtol=0)
        assert int(logits.argmax()) == result["first_step_top10"][0][0]


def test_smollm2_equals_its_goldens(smollm2):
    check_real(smollm2, "smollm2")


@pytest.mark.slow
def test_gemma3_270m_equals_its_goldens():
    with LLM("gemma3-270m", max_model_len=256, max_num_seqs=8, enforce_eager=True, block_size=32) as llm:
        check_real(llm, "gemma3")


def test_text_in_text_out_with_the_packaged_model(smollm2):
    results = json.loads((REAL / "smollm2.json").read_text())["results"]
    greedy_64 = SamplingParams(temperature=0.0, max_tokens=64)
    [output] = smollm2.chat([{"role": "user", "content": results[0]["prompt"]}], greedy_64, use_tqdm=False)
    assert output.prompt_token_ids == results[0]["prompt_ids"]
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
