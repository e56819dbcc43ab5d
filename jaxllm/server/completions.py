"""POST /v1/completions, from prepared requests, one for each prompt, to answer or stream of events."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from jaxllm.api.logprobs import PromptLogprobs
from jaxllm.api.outputs import OutputDelta
from jaxllm.server.answers import COMPLETION, AnswerHead, Json, Usage, choice
from jaxllm.server.generation import Answer, Generator
from jaxllm.server.logprobs import CompletionLogprobs, LogprobStyle, joined, prompt_logprobs_json
from jaxllm.server.prepare import PreparedRequest
from jaxllm.server.protocol import CompletionRequest
from jaxllm.server.sse import event


async def completion_answer(
    generator: Generator,
    requests: Sequence[PreparedRequest],
    body: CompletionRequest,
    head: AnswerHead,
    usage: Usage,
    style: LogprobStyle | None,
) -> Json:
    """Gives the whole answer."""
    answers = await generator.run(requests)
    if usage.num_cached_tokens is not None:
        usage.num_cached_tokens = sum(answer.num_cached_tokens for answer in answers)
    choices = []
    for request, answer in zip(requests, answers, strict=True):
        for sample in answer.samples:
            writer = _Choice(len(choices), request, body, style)
            shaped = writer.shape(sample, answer.prompt_logprobs)
            if body.prompt_logprobs is not None and answer.prompt_logprobs is not None:
                shaped["prompt_logprobs"] = prompt_logprobs_json(answer.prompt_logprobs)
            choices.append(shaped)
            usage.num_output_tokens += writer.num_tokens
    return head.shape(COMPLETION, choices, usage.shape())


async def completion_events(
    generator: Generator,
    requests: Sequence[PreparedRequest],
    body: CompletionRequest,
    head: AnswerHead,
    usage: Usage,
    style: LogprobStyle | None,
) -> AsyncGenerator[bytes]:
    """Yields the answers as they come, those of all prompts mixed."""
    n = body.n or 1
    writers = [_Choice(i * n + k, request, body, style) for i, request in enumerate(requests) for k in range(n)]
    scored: list[PromptLogprobs | None] = [None] * len(requests)
    cached = [0] * len(requests)
    async with aclosing(generator.stream_all(requests)) as deltas:
        async for index, delta in deltas:
            writer = writers[index * n + delta.index]
            scored[index] = scored[index] or delta.prompt_logprobs
            usage.num_output_tokens -= writer.num_tokens
            shaped = writer.shape(delta, scored[index])
            usage.num_output_tokens += writer.num_tokens
            if usage.num_cached_tokens is not None and delta.index == 0:
                usage.num_cached_tokens += delta.num_cached_tokens - cached[index]
                cached[index] = delta.num_cached_tokens
            running = usage.shape() if body.wants_running_usage else None
            tells = shaped["text"] or shaped["finish_reason"] or shaped["logprobs"] or shaped.get("token_ids")
            if tells or running:
                writer.has_begun = True
                yield event(head.shape(COMPLETION, [shaped], running))
    if body.wants_usage:
        yield event(head.shape(COMPLETION, [], usage.shape()))


class _Choice:
    """One sample of one prompt on its way to the client. With `echo` the prompt stands in front of its first piece."""

    def __init__(self, index: int, request: PreparedRequest, body: CompletionRequest, style: LogprobStyle | None):
        self.has_begun = False
        self.num_tokens = 0
        self._index = index
        self._request = request
        self._body = body
        self._logprobs = None if style is None else CompletionLogprobs(style)

    def shape(self, piece: Answer | OutputDelta, prompt_logprobs: PromptLogprobs | None) -> Json:
        """Shapes what came new, or the whole answer."""
        drops = self._request.drops_output
        text, ids = ("", []) if drops else (piece.text, list(piece.token_ids))
        self.num_tokens += len(ids)
        prompt_ids = self._request.prompt.token_ids
        logprobs = None
        if self._logprobs is not None:
            echoed = None
            if self._body.echo and not self.has_begun and prompt_logprobs is not None:
                echoed = self._logprobs.shape(prompt_ids, prompt_logprobs)
            own = self._logprobs.shape(ids, () if drops else piece.logprobs or ()) if ids else None
            logprobs = joined(echoed, own) if echoed and own else echoed or own
        if not self.has_begun:
            text = self._request.echo + text
        told_ids = ids if self._body.return_token_ids else None
        shaped = choice(self._index, {"text": text}, piece.finish_reason, piece.stop_reason, told_ids, logprobs)
        if self._body.return_token_ids and not self.has_begun:
            shaped["prompt_token_ids"] = prompt_ids
        return shaped
