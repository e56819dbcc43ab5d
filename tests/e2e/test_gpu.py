"""What only a GPU can show: float32 that is not TF32, a pool sized from the card, a real model's shape."""

import jax
import pytest

from jaxllm import LLM, SamplingParams

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
