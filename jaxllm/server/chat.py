"""POST /v1/chat/completions, from prepared request to answer or stream of events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxllm.server.answers import CHAT, CHAT_CHUNK, AnswerHead, Json, Usage, choice
from jaxllm.server.generation import Generator
from jaxllm.server.prepare import PreparedRequest
from jaxllm.server.protocol import ChatRequest
from jaxllm.server.sse import event


async def chat_answer(
    generator: Generator, request: PreparedRequest, body: ChatRequest, head: AnswerHead, usage: Usage, role: str
) -> Json:
    """Gives the whole answer."""
    (answer,) = await generator.run([request])
    usage.num_output_tokens = len(answer.token_ids)
    if usage.num_cached_tokens is not None:
        usage.num_cached_tokens = answer.num_cached_tokens
    message = {"message": {"role": role, "content": answer.text}}
    ids = answer.token_ids if body.return_token_ids else None
    shaped = head.shape(CHAT, [choice(0, message, answer.finish_reason, answer.stop_reason, ids)], usage.shape())
    return {**shaped, "prompt_token_ids": request.prompt.token_ids} if body.return_token_ids else shaped


async def chat_events(
    generator: Generator, request: PreparedRequest, body: ChatRequest, head: AnswerHead, usage: Usage, role: str
) -> AsyncGenerator[bytes]:
    """Yields the answer as it comes. The role goes out with the first token, so that clients measure true latencies."""
    opening = {"delta": {"role": role, "content": ""}}
    async with aclosing(generator.stream(request)) as deltas:
        first = True
        async for delta in deltas:
            usage.num_output_tokens = delta.num_output_tokens
            if usage.num_cached_tokens is not None:
                usage.num_cached_tokens = delta.num_cached_tokens
            running = usage.shape() if body.wants_running_usage else None
            piece = b""
            if first:
                first = False
                shaped = head.shape(CHAT_CHUNK, [choice(0, opening, None, None)], running)
                if body.return_token_ids:
                    shaped["prompt_token_ids"] = request.prompt.token_ids
                piece = event(shaped)
            ids = delta.token_ids if body.return_token_ids else None
            if delta.text or delta.finish_reason or ids or running:
                content = {"delta": {"content": delta.text}}
                chosen = choice(0, content, delta.finish_reason, delta.stop_reason, ids)
                piece += event(head.shape(CHAT_CHUNK, [chosen], running))
            if piece:
                yield piece
    if body.wants_usage:
        yield event(head.shape(CHAT_CHUNK, [], usage.shape()))
