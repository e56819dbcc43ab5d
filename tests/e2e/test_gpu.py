"""What only a GPU can show: float32 that is not TF32, a pool sized from the card, a real model's shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.kernels import select

pytestmark = pytest.mark.gpu

FAMILIES = ("llama", "llama_tied", "llama_fp16_sharded", "gemma3_text")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def _on_a_gpu():
    assert jax.default_backend() == "gpu", "these tests were asked for (-m gpu), and jax finds no GPU"


@pytest.mark.parametrize("max_num_batched_tokens", [16, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_tokens_on_the_gpu_equal_the_goldens(family, max_num_batched_tokens, engine_of, golden_cases):
    cases = golden_cases(family)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": max_num_batched_tokens, "num_gpu_blocks_override": 256}
    with engine_of(family, **options) as driver:
        for i, case in enumerate(cases):
            driver.add(str(i), case["prompt_ids"], greedy(32))
        driver.run()
        assert [driver.tokens[str(i)] for i in range(len(cases))] == [case["output_ids"] for case in cases]


def test_an_8b_shaped_dummy_model_generates_within_the_memory_it_planned():
    prompts = [[(37 * i + 11 * j) % 100_000 + 100 for j in range(20 + 40 * i)] for i in range(8)]
    with LLM("llama-3.1-8b", load_format="dummy", max_model_len=4096, max_num_seqs=64, enforce_eager=True) as llm:
        memory = llm._built.memory
        for label, value in llm.report():
            print(f"{label:22} {value}")
        together = llm.generate(prompts, greedy(32), use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 32 for output in together)
        stats = jax.devices()[0].memory_stats()
        assert stats["peak_bytes_in_use"] <= stats["bytes_limit"]
        assert memory.weights > 16e9
        assert memory.pool + memory.weights + memory.temporaries <= memory.device
        assert memory.num_tokens > 100_000


def test_bfloat16_logprobs_differ_from_float32_no_more_than_the_references_do(monkeypatch):
    """4 prompts x 256 tokens: what each engine told of the tokens that it chose, against the float32 model's score."""
    prompts = np.random.default_rng(0).integers(100, 100_000, (4, 100)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True, logprobs=0)
    shape = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 256}
    options = {**shape, "enforce_eager": True, "hf_overrides": {"num_hidden_layers": 12}}

    def told(llm: LLM) -> list[tuple[list[int], list[float]]]:
        chosen = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        return [
            (list(c.token_ids), [step[t].logprob for step, t in zip(c.logprobs or (), c.token_ids, strict=True)])
            for c in chosen
        ]

    with LLM("qwen3-0.6b", dtype="bfloat16", **options) as llm:
        fast = told(llm)
        weights = llm.apply_model(lambda tree: jax.tree.map(lambda w: np.asarray(w.astype(jnp.float32)), tree))
    only_references = {operation: versions[-1:] for operation, versions in select.VERSIONS.items()}
    monkeypatch.setattr(select, "VERSIONS", only_references)
    with LLM("qwen3-0.6b", dtype="bfloat16", **options) as llm:
        plain = told(llm)
    with LLM("qwen3-0.6b", dtype="float32", **options) as llm:
        llm.update_weights(weights)

        def differences(answers: list[tuple[list[int], list[float]]]) -> np.ndarray:
            scores = llm.score(prompts, [ids for ids, _ in answers])
            exact = [score.logprobs for score in scores]
            return np.abs(np.array([logprobs for _, logprobs in answers]) - np.array(exact)).ravel()

        ours, reference = differences(fast), differences(plain)
    for name, of in (("p99", lambda d: np.quantile(d, 0.99)), ("maximum", np.max)):
        print(f"{name} of the difference to float32: {of(ours):.4f}, the reference's {of(reference):.4f}")
    assert np.quantile(ours, 0.99) <= 1.5 * np.quantile(reference, 0.99)
    assert ours.max() <= 1.5 * reference.max()
