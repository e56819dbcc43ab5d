"""POST /v1/chat/completions, from prepared request to answer or stream of events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxllm.server.answers import CHAT, CHAT_CHUNK, AnswerHead, Json, Usage, choice
from jaxllm.server.generation import Generator
from jaxllm.server.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs_json
from jaxllm.server.prepare import PreparedRequest
from jaxllm.server.protocol import ChatRequest
from jaxllm.server.sse import event


async def chat_answer(
    generator: Generator,
    request: PreparedRequest,
    body: ChatRequest,
    head: AnswerHead,
    usage: Usage,
    role: str,
    style: LogprobStyle | None,
) -> Json:
    """Gives the whole answer."""
    (answers,) = await generator.run([request])
    usage.num_output_tokens = sum(len(sample.token_ids) for sample in answers.samples)
    if usage.num_cached_tokens is not None:
        usage.num_cached_tokens = answers.num_cached_tokens
    choices = []
    for index, sample in enumerate(answers.samples):
        message = {"message": {"role": role, "content": sample.text}}
        ids = sample.token_ids if body.return_token_ids else None
        logprobs = None if style is None else chat_logprobs(sample.token_ids, sample.logprobs, style)
        choices.append(choice(index, message, sample.finish_reason, sample.stop_reason, ids, logprobs))
    shaped = head.shape(CHAT, choices, usage.shape())
    if body.return_token_ids:
        shaped["prompt_token_ids"] = request.prompt.token_ids
    if answers.prompt_logprobs is not None:
        shaped["prompt_logprobs"] = prompt_logprobs_json(answers.prompt_logprobs)
    return shaped


async def chat_events(
    generator: Generator,
    request: PreparedRequest,
    body: ChatRequest,
    head: AnswerHead,
    usage: Usage,
    role: str,
    style: LogprobStyle | None,
) -> AsyncGenerator[bytes]:
    """Yields the answer as it comes. The role goes out with the first token, so that clients measure true latencies."""
    opening = {"delta": {"role": role, "content": ""}}
    begun: set[int] = set()
    async with aclosing(generator.stream(request)) as deltas:
        async for delta in deltas:
            usage.num_output_tokens += len(delta.token_ids)
            if usage.num_cached_tokens is not None and delta.index == 0:
                usage.num_cached_tokens = delta.num_cached_tokens
            running = usage.shape() if body.wants_running_usage else None
            piece = b""
            if delta.index not in begun:
                shaped = head.shape(CHAT_CHUNK, [choice(delta.index, opening, None, None)], running)
                if body.return_token_ids and not begun:
                    shaped["prompt_token_ids"] = request.prompt.token_ids
                begun.add(delta.index)
                piece = event(shaped)
            ids = delta.token_ids if body.return_token_ids else None
            scored = style is not None and delta.token_ids
            logprobs = chat_logprobs(delta.token_ids, delta.logprobs or (), style) if style and scored else None
            if delta.text or delta.finish_reason or ids or running or logprobs:
                content = {"delta": {"content": delta.text}}
                chosen = choice(delta.index, content, delta.finish_reason, delta.stop_reason, ids, logprobs)
                piece += event(head.shape(CHAT_CHUNK, [chosen], running))
            if piece:
                yield piece
    if body.wants_usage:
        yield event(head.shape(CHAT_CHUNK, [], usage.shape()))
