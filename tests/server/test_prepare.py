import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.engine.limits import EngineLimits
from jaxllm.server.errors import ApiError
from jaxllm.server.prepare import check_length, prepare_completions
from jaxllm.server.prompts import encode, split_prompts
from jaxllm.server.protocol import CompletionRequest


@pytest.mark.parametrize(
    ("prompt", "split"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([[]], [[]])],
)
def test_a_prompt_has_four_shapes(prompt: object, split: list):
    assert split_prompts(prompt) == split


def test_a_prompt_that_just_fits_is_taken_and_one_token_more_is_not():
    check_length(90, 10, "max_tokens", 100)
    check_length(99, None, "max_tokens", 100)
    with pytest.raises(ApiError, match=r"101 tokens \(91 in the prompt, 10 in the output\).* max_tokens to 9 or less"):
        check_length(91, 10, "max_tokens", 100)
    with pytest.raises(ApiError, match="maximum context length is 100 tokens, but the prompt has 100"):
        check_length(100, None, "max_tokens", 100)


def test_a_long_text_is_tokenized_beside_the_event_loop(tokenizer):
    async def ticks_while(text: str) -> tuple[int, int]:
        task = asyncio.create_task(encode(tokenizer, text, False, "prompt"))
        num_ticks = 0
        while not task.done():
            await asyncio.sleep(0)
            num_ticks += 1
        return num_ticks, len(task.result().token_ids)

    assert asyncio.run(ticks_while("a" * 100)) == (1, 100)
    num_ticks, num_tokens = asyncio.run(ticks_while("a b " * 100_000))
    assert num_tokens == 400_000
    assert num_ticks > 3


def prepared(sampling_defaults: dict[str, Any], **body: Any):
    limits = EngineLimits(vocab_size=100, max_model_len=64, eos_token_ids=(2,))
    llm: Any = SimpleNamespace(
        limits=limits,
        sampling_defaults=sampling_defaults,
        get_tokenizer=lambda: SimpleNamespace(),
        check_request=lambda prompt, params: params,
    )
    (request,) = asyncio.run(prepare_completions(llm, CompletionRequest(prompt=[3, 4, 5, 6], **body)))
    return request.params


def test_fields_that_a_request_leaves_out_are_the_models_defaults():
    of_model = {"temperature": 0.6, "top_k": 20, "max_tokens": 30}
    params = prepared(of_model)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 20, 1.0, 30)
    params = prepared(of_model, temperature=0.0, top_k=-1, top_p=0.5, max_tokens=7)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.0, -1, 0.5, 7)
    assert of_model == {"temperature": 0.6, "top_k": 20, "max_tokens": 30}


def test_a_default_length_that_does_not_fit_is_cut_to_the_room():
    assert prepared({"max_tokens": 500}).max_tokens == 60
    assert prepared({}).max_tokens == 16
