"""Every prompt but the first finds the shared beginning."""

import pytest

from jaxllm import LLM


@pytest.mark.slow
def test_all_but_the_first_prompt_find_the_notes(example):
    script = example("shared_prefix")
    with LLM("smollm2", max_model_len=512, max_num_seqs=16, enforce_eager=True) as llm:
        results = script.ask(llm, 4)
    lengths = [len(result.prompt_token_ids) for result in results]
    assert results[0].num_cached_tokens == 0
    assert all(r.num_cached_tokens > 0.9 * length for r, length in zip(results[1:], lengths[1:], strict=True))
