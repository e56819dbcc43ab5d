"""Families against a second writing of them in plain numpy, which itself is held against transformers' goldens."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxllm import LLM, SamplingParams
from jaxllm.models.registry import find_family

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SCRIPTED = (
    *("cohere", "cohere2", "glm", "glm4", "starcoder2", "falcon3"),
    *("llama_yarn", "llama_linear", "llama_dynamic", "phi4_mini"),
)
GOLDENS = (
    *("llama", "llama_tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2"),
    *("granite", "smollm3", *SCRIPTED),
)
LONGEST = 200
# Contexts up to which the ropes that depend on the longest one are what they were first trained as.
SHORT = {"phi4_mini": 48, "llama_dynamic": 64}


@pytest.fixture
def transformers_golden(golden, name):
    config = json.loads((golden / name / "config.json").read_text())
    cases = json.loads((golden / name / "golden.json").read_text())["cases"]
    return config, load_file(golden / name / "model.safetensors"), cases


@pytest.mark.parametrize("name", GOLDENS)
def test_the_plain_writing_gives_the_logits_of_transformers(transformers_golden, plain, name):
    config, tensors, cases = transformers_golden
    for case in cases:
        prompt = case["prompt_ids"]
        logits = plain(config, tensors, prompt, len(prompt))[-1]
        np.testing.assert_allclose(logits, case["logits_first"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", SHORT)
def test_the_plain_writing_stretches_ropes_with_the_text_as_transformers_does(transformers_golden, plain, name):
    config, tensors, cases = transformers_golden
    for case in cases:
        context, last = case["prompt_ids"] + case["output_ids"][:-1], case["output_ids"][-1]
        logits = plain(config, tensors, context, len(context))[-1]
        logprob = logits[last] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert logprob == pytest.approx(case["logprobs"][-1], abs=2e-4)


# The others' goldens are of runs of any length.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("llama_yarn", *SHORT))) for name in SCRIPTED],
)
def test_all_logits_of_a_prompt_are_those_of_the_plain_writing(
    tmp_path, make_golden, random_checkpoint, plain, prompt_runner, name
):
    config, tensors = random_checkpoint(tmp_path, name)
    family = find_family(config)[1]
    runner = prompt_runner(family, family.configure(config), tensors)
    prompt = make_golden.random_prompts(config["vocab_size"])[-1]
    lengths = [LONGEST, SHORT[name]] if name in SHORT else [LONGEST]
    found = [runner.logits(prompt, length) for length in lengths]
    for length, logits in zip(lengths, found, strict=True):
        np.testing.assert_allclose(logits, plain(config, tensors, prompt, length), atol=1e-3, rtol=0)
    if name in SHORT:
        assert np.abs(found[0] - found[1]).max() > 0.1


def check(llm, config, tensors, plain, prompts, length):
    """Every token is the plain writing's best one, but for ties within rounding."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        chosen = output.outputs[0].token_ids
        logits = plain(config, tensors, prompt + chosen[:-1], length)[len(prompt) - 1 :]
        lost = logits.max(-1) - logits[np.arange(len(chosen)), chosen]
        assert lost.max() < 1e-4
        second = np.partition(logits, -2, axis=-1)[:, -2]
        assert np.median(logits.max(-1) - second) > 0.05, "the logits are too flat to tell"


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTED)
def test_tokens_of_the_engine_are_those_of_the_plain_writing(
    tmp_path, make_golden, random_checkpoint, plain, pad_to_the_largest, name
):
    config, tensors = random_checkpoint(tmp_path, name)
    prompts = make_golden.random_prompts(config["vocab_size"])
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 64, "enforce_eager": True}
    with LLM(str(tmp_path), max_model_len=LONGEST, skip_tokenizer_init=True, **options) as llm:
        pad_to_the_largest(llm._built)
        check(llm, config, tensors, plain, prompts, LONGEST)
    if name in SHORT:
        within = [prompt for prompt in prompts if len(prompt) + 24 <= SHORT[name]]
        assert len(within) >= 3
        with LLM(str(tmp_path), max_model_len=SHORT[name], skip_tokenizer_init=True, **options) as llm:
            pad_to_the_largest(llm._built)
            check(llm, config, tensors, plain, within, SHORT[name])
