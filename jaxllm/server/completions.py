"""POST /v1/completions, from prepared requests, one for each prompt, to answer or stream of events."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxllm.server.answers import COMPLETION, AnswerHead, Json, Usage, choice
from jaxllm.server.generation import Generator
from jaxllm.server.prepare import PreparedRequest
from jaxllm.server.protocol import CompletionRequest
from jaxllm.server.sse import event


async def completion_answer(
    generator: Generator, requests: Sequence[PreparedRequest], body: CompletionRequest, head: AnswerHead, usage: Usage
) -> Json:
    """Gives the whole answer."""
    answers = await generator.run(requests)
    usage.num_output_tokens = sum(len(answer.token_ids) for answer in answers)
    if usage.num_cached_tokens is not None:
        usage.num_cached_tokens = sum(answer.num_cached_tokens for answer in answers)
    choices = []
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        ids = answer.token_ids if body.return_token_ids else None
        shaped = choice(index, {"text": answer.text}, answer.finish_reason, answer.stop_reason, ids)
        choices.append({**shaped, "prompt_token_ids": request.prompt.token_ids} if body.return_token_ids else shaped)
    return head.shape(COMPLETION, choices, usage.shape())


async def completion_events(
    generator: Generator, requests: Sequence[PreparedRequest], body: CompletionRequest, head: AnswerHead, usage: Usage
) -> AsyncGenerator[bytes]:
    """Yields the answers as they come, those of all prompts mixed."""
    begun: set[int] = set()
    cached = [0] * len(requests)
    async with aclosing(generator.stream_all(requests)) as deltas:
        async for index, delta in deltas:
            usage.num_output_tokens += len(delta.token_ids)
            cached[index] = delta.num_cached_tokens
            if usage.num_cached_tokens is not None:
                usage.num_cached_tokens = sum(cached)
            running = usage.shape() if body.wants_running_usage else None
            ids = delta.token_ids if body.return_token_ids else None
            if delta.text or delta.finish_reason or ids or running:
                chosen = choice(index, {"text": delta.text}, delta.finish_reason, delta.stop_reason, ids)
                if body.return_token_ids and index not in begun:
                    begun.add(index)
                    chosen["prompt_token_ids"] = requests[index].prompt.token_ids
                yield event(head.shape(COMPLETION, [chosen], running))
    if body.wants_usage:
        yield event(head.shape(COMPLETION, [], usage.shape()))
