"""A batch of 32 against 32 single calls of the packaged model: the same tokens, and how much sooner."""

import time
from collections.abc import Callable

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams

NOUNS = ("cat", "river", "king", "robot", "ship", "teacher", "forest", "moon")
OPENINGS = ("Once upon a time, a", "The best thing about a", "Nobody expected the", "In the morning, the")
PROMPTS = [f"{opening} {noun}" for opening in OPENINGS for noun in NOUNS]
NUM_TOKENS = 8
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    for i in range(32)
]


def timed(llm: LLM, run: Callable[[], list[RequestOutput]]) -> tuple[list[RequestOutput], float]:
    llm.reset_prefix_cache()
    start = time.perf_counter()
    outputs = run()
    return outputs, time.perf_counter() - start


@pytest.mark.slow
def test_a_batch_of_32_equals_32_single_calls_and_is_faster():
    with LLM("smollm2", dtype="float32", max_model_len=64, max_num_seqs=32, enforce_eager=True) as llm:

        def single(count: int) -> list[RequestOutput]:
            return [llm.generate(PROMPTS[i], PARAMS[i], use_tqdm=False)[0] for i in range(count)]

        def batch() -> list[RequestOutput]:
            return llm.generate(PROMPTS, PARAMS, use_tqdm=False)

        timed(llm, batch)  # compiles
        together, seconds = timed(llm, batch)
        timed(llm, lambda: single(2))
        alone, single_seconds = timed(llm, lambda: single(32))
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    speeds = 32 * NUM_TOKENS / seconds, 32 * NUM_TOKENS / single_seconds
    print(
        "\n32 requests of 8 tokens: {:.1f} tok/s together, {:.1f} one by one, {:.2f} times as fast".format(
            *speeds, single_seconds / seconds
        )
    )
    assert seconds < single_seconds
