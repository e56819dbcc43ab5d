"""A batch of 32 against 32 single calls of the packaged model: the same tokens, and how much sooner."""

import time

import pytest

from jaxllm import LLM, SamplingParams

NOUNS = ("cat", "river", "king", "robot", "ship", "teacher", "forest", "moon")
OPENINGS = ("Once upon a time, a", "The best thing about a", "Nobody expected the", "In the morning, the")
PROMPTS = [f"{opening} {noun}" for opening in OPENINGS for noun in NOUNS]


@pytest.mark.slow
def test_a_batch_of_32_equals_32_single_calls_and_is_faster():
    params = [
        SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=16, ignore_eos=True, logprobs=0)
        for i in range(32)
    ]
    with LLM("smollm2", dtype="float32", max_model_len=64, max_num_seqs=32, enforce_eager=True) as llm:
        for repeat in range(2):  # the first run compiles
            llm.reset_prefix_cache()
            start = time.perf_counter()
            batch = llm.generate(PROMPTS, params, use_tqdm=False)
            seconds = time.perf_counter() - start
        for repeat in range(2):
            llm.reset_prefix_cache()
            start = time.perf_counter()
            single = [
                llm.generate(prompt, param, use_tqdm=False)[0]
                for prompt, param in list(zip(PROMPTS, params, strict=True))[: 2 if repeat == 0 else 32]
            ]
            single_seconds = time.perf_counter() - start
    for one, other in zip(batch, single, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    print(
        f"\n32 requests of 16 tokens: {32 * 16 / seconds:.1f} tok/s together, {32 * 16 / single_seconds:.1f} one by one"
    )
    print(f"ratio {single_seconds / seconds:.2f}")
    assert seconds < single_seconds
