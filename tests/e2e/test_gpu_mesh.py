"""Two GPUs give the tokens of one, whoever adds up: our kernel in the others' memory, or NCCL."""

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from jaxllm import LLM, CompletionOutput, SamplingParams

pytestmark = pytest.mark.gpu

# One for each way in which layers add up: plain, with norms behind, all heads' squares, attention and MLP side by side.
FAMILIES = ("llama", "gemma2", "olmo2", "cohere")
SHAPES = {"tensor": {"tensor_parallel_size": 2}, "data": {"data_parallel_size": 2}}
ADDED_BY = {"us": {}, "nccl": {"disable_custom_all_reduce": True, "capture_collectives": True}}


@pytest.fixture(scope="module", autouse=True)
def _on_two_gpus():
    assert jax.default_backend() == "gpu", "these tests were asked for (-m gpu), and jax finds no GPU"
    if len(jax.devices()) < 2:
        pytest.skip(f"it takes two GPUs, found {len(jax.devices())}")


def greedy(max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_of_two_gpus_equal_the_goldens(family, shape, engine_of, golden_cases):
    cases = golden_cases(family)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 256}
    with engine_of(family, **options, **SHAPES[shape]) as driver:
        for i, case in enumerate(cases):
            driver.add(str(i), case["prompt_ids"], greedy(len(case["output_ids"])))
        driver.run()
        assert [driver.tokens[str(i)] for i in range(len(cases))] == [case["output_ids"] for case in cases]


def test_an_8b_shaped_model_in_float32_gives_the_same_tokens_on_two_gpus():
    prompts = np.random.default_rng(0).integers(100, 100_000, (20, 60)).tolist()
    options = {"load_format": "dummy", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}
    options |= {"num_gpu_blocks_override": 1024, "enforce_eager": True, "hf_overrides": {"num_hidden_layers": 4}}

    def answers(**more) -> list[CompletionOutput]:
        with LLM("llama-3.1-8b", **options, **more) as llm:
            return [out.outputs[0] for out in llm.generate(prompts, greedy(48, logprobs=2), use_tqdm=False)]

    one = answers()
    assert len({tuple(answer.token_ids) for answer in one}) == len(one)
    for shape in SHAPES.values():
        for added_by in ADDED_BY.values():
            for answer, expected in zip(answers(**shape, **added_by), one, strict=True):
                assert not parts_without_a_tie(answer.token_ids, expected), (shape, added_by)


def parts_without_a_tie(token_ids: Sequence[int], expected: CompletionOutput) -> bool:
    """Tells tokens that part from the expected ones where those were the best by more than float32's rounding.

    The ranks' sums are rounded otherwise. One of these 960 tokens leads the second best by 2e-6; sums differ by 1e-5.
    """
    pairs = enumerate(zip(token_ids, expected.token_ids, strict=True))
    parting = next((i for i, (found, wanted) in pairs if found != wanted), None)
    if parting is None:
        return False
    assert expected.logprobs is not None
    best, second = sorted((each.logprob for each in expected.logprobs[parting].values()), reverse=True)[:2]
    return best - second > 1e-4
