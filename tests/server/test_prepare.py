import asyncio

import pytest

from jaxllm.server.errors import ApiError
from jaxllm.server.prepare import _encode, check_length, split_prompts


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
        task = asyncio.create_task(_encode(tokenizer, text, False, "prompt"))
        num_ticks = 0
        while not task.done():
            await asyncio.sleep(0)
            num_ticks += 1
        return num_ticks, len(task.result().token_ids)

    assert asyncio.run(ticks_while("a" * 100)) == (1, 100)
    num_ticks, num_tokens = asyncio.run(ticks_while("a b " * 100_000))
    assert num_tokens == 400_000
    assert num_ticks > 3
