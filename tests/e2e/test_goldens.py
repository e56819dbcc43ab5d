"""The engine's greedy tokens and logits against those of transformers, in float32."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.input_builder import PackedStep
from jaxllm.engine.step_inputs import host_views, packed_size
from jaxllm.models.read_config import read_config
from jaxllm.models.registry import find_family
from jaxllm.scheduler.kv_groups import KVGroups

GOLDEN = Path(__file__).parents[1] / "golden"
# Their ropes depend on the longest context of the run: unchanged up to these lengths.
UNCHANGED_UPTO = {"phi4_mini": 48, "llama_dynamic": 64}
MADE = sorted(file.parent.name for file in GOLDEN.glob("*/golden.json"))
FAMILIES = [name for name in MADE if name not in UNCHANGED_UPTO]
# Others have all that these have, or their ropes are all that is new.
LEFT_TO_THE_SLOW_STEP = {"glm", "falcon3", "llama_yarn", "llama_linear", "llama_dynamic"}
# One group of layers and several; the steps of the others are padded to two shapes, since compiling takes the time.
EVERY_SHAPE = ("llama", "gemma3_text")
REAL = GOLDEN / "real"


def mostly_fast(names: Iterable[str]) -> list:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in LEFT_TO_THE_SLOW_STEP)) for name in names]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def prompt_logits(driver, prompts: list[list[int]]) -> np.ndarray:
    """Logits of the last token of each prompt, all in one step, through the same cache and tables as any other."""
    runner, buckets = driver.built.runner, driver.built.buckets
    groups, block_size, last = runner.program.num_groups, runner.program.block_size, np.cumsum([*map(len, prompts)]) - 1
    shape = buckets.shape(int(last[-1]) + 1, len(prompts), max(-(-len(p) // block_size) for p in prompts), "greedy")
    packed = np.zeros((1, packed_size(shape, groups)), np.int32)
    inputs = host_views(packed[0], shape, groups)
    inputs.position[:] = -1
    inputs.query_start[1:] = last[-1] + 1
    next_block, start = 1, 0
    for request, prompt in enumerate(prompts):
        tokens, width = slice(start, start + len(prompt)), -(-len(prompt) // block_size)
        inputs.token[tokens], inputs.request[tokens] = prompt, request
        inputs.position[tokens] = range(len(prompt))
        inputs.query_start[request + 1], inputs.context_len[request] = tokens.stop, len(prompt)
        for group in range(groups):
            inputs.block_table[group, request, :width] = next_block + np.arange(width)
            next_block += width
        start = tokens.stop
    return runner.logits(PackedStep(shape, packed))[0, last]


def check_tokens(driver, cases: list[dict]) -> None:
    for i, case in enumerate(cases):
        driver.add(str(i), case["prompt_ids"], greedy(len(case["output_ids"])))
    driver.run()
    for i, case in enumerate(cases):
        assert driver.tokens[str(i)] == case["output_ids"]
        assert driver.ends[str(i)] == "length"


def check_first_logits(driver, cases: list[dict]) -> None:
    logits = prompt_logits(driver, [case["prompt_ids"] for case in cases])
    np.testing.assert_allclose(logits, [case["logits_first"] for case in cases], atol=1e-3, rtol=0)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("family", mostly_fast(FAMILIES))
def test_greedy_tokens_and_first_logits_equal_the_goldens(family, engine_of, golden_cases):
    cases = golden_cases(family)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 8 << 20}
    with engine_of(family, few_shapes=family not in EVERY_SHAPE, **options) as driver:
        check_tokens(driver, cases)
        check_first_logits(driver, cases)


# Chunks change what a token sees and where it stands: one family for each way in which windows and ropes differ. Seven
# more run in chunks and preempt on the meshes of test_mesh.py.
IN_CHUNKS = ("cohere2", "gemma3_text", "glm", "llama", "llama_yarn", "mistral", "smollm3")


@pytest.mark.slow
@pytest.mark.parametrize("family", IN_CHUNKS)
def test_the_goldens_hold_in_chunks_and_in_a_pool_that_preempts(family, engine_of, golden_cases):
    config = json.loads((GOLDEN / family / "config.json").read_text())
    windows = read_config(find_family(config)[1], config).kv_layout.windows
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 176, "block_size": 8}
    num_blocks = 1 + KVGroups(windows).num_blocks(176, 8, 24)
    with engine_of(family, few_shapes=True, **small, num_gpu_blocks_override=num_blocks) as driver:
        check_tokens(driver, golden_cases(family))
        assert driver.engine.scheduler.stats.num_preemptions > 0


def within(case: dict, limit: int) -> dict:
    """The beginning of a case that a run of so long contexts can generate."""
    return case | {"output_ids": case["output_ids"][: limit - len(case["prompt_ids"])]}


def beyond(case: dict, limit: int) -> dict:
    """The rest of a case from its first context on that is longer than the limit, as a prompt and its continuation."""
    known = max(0, limit + 1 - len(case["prompt_ids"]))
    prompt, rest = case["prompt_ids"] + case["output_ids"][:known], case["output_ids"][known:]
    return case | {"prompt_ids": prompt, "output_ids": rest}


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("family", mostly_fast(name for name in MADE if name in UNCHANGED_UPTO))
def test_ropes_that_depend_on_the_longest_context_equal_the_goldens_on_both_sides(family, engine_of, golden_cases):
    limit, cases = UNCHANGED_UPTO[family], golden_cases(family)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 8 << 20, "few_shapes": True}
    with engine_of(family, **options, max_model_len=limit) as driver:
        check_tokens(driver, [within(case, limit) for case in cases if len(case["prompt_ids"]) < limit])
        check_first_logits(driver, [case for case in cases if len(case["prompt_ids"]) <= limit])
    long = [case for case in cases if len(case["prompt_ids"]) > limit]
    # transformers stretches a dynamic rope again with every token: only a first token's context is as long as the run.
    [length] = {len(case["prompt_ids"]) for case in long} if family == "llama_dynamic" else [512]
    with engine_of(family, **options, max_model_len=length) as driver:
        check_first_logits(driver, long)
        if family != "llama_dynamic":
            crossing = [beyond(case, limit) for case in cases if len(case["prompt_ids"]) + 31 > limit]
            assert min(len(case["output_ids"]) for case in crossing) < 32
            check_tokens(driver, crossing)


def check_real(llm: LLM, name: str) -> None:
    results = json.loads((REAL / f"{name}.json").read_text())["results"]
    prompts = [{"prompt_token_ids": result["prompt_ids"]} for result in results]
    for output, result in zip(llm.generate(prompts, greedy(64), use_tqdm=False), results, strict=True):
        assert output.outputs[0].token_ids == result["output_ids"]
    driver = type("Built", (), {"built": llm._built})
    for result, logits in zip(results, prompt_logits(driver, [r["prompt_ids"] for r in results]), strict=True):
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
