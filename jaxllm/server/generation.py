"""Runs prepared requests on AsyncLLM and books them. Knows deltas; no HTTP, no JSON."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from jaxllm.api.async_llm import AsyncLLM
from jaxllm.api.outputs import OutputDelta
from jaxllm.server.metrics import ServerMetrics
from jaxllm.server.prepare import PreparedRequest


@dataclass(slots=True)
class Answer:
    """All that a request was given."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0


class Generator:
    """The engine and its books, as routes use them. Leaving an iteration, or cancelling a call, aborts the request."""

    def __init__(self, llm: AsyncLLM, metrics: ServerMetrics):
        self._llm = llm
        self._metrics = metrics

    async def stream(self, request: PreparedRequest) -> AsyncGenerator[OutputDelta]:
        """Yields what comes new for one request.

        Raises:
            RequestError, EngineDeadError: it was lost, with the cause.
        """
        meter = self._metrics.start(request.num_prompt_tokens)
        try:
            async with aclosing(self._llm.stream(*request.as_arguments())) as deltas:
                async for delta in deltas:
                    meter.take(delta)
                    yield delta
        except Exception:
            meter.end("error")
            raise
        finally:
            meter.end("abort")  # the reader left: any other end is booked already

    async def stream_all(self, requests: Sequence[PreparedRequest]) -> AsyncGenerator[tuple[int, OutputDelta]]:
        """Yields what comes new for several requests, each with its place among them; the first error ends all."""
        if len(requests) == 1:
            async with aclosing(self.stream(requests[0])) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        news: asyncio.Queue[tuple[int, OutputDelta | Exception | None]] = asyncio.Queue()

        async def follow(index: int) -> None:
            try:
                async with aclosing(self.stream(requests[index])) as deltas:
                    async for delta in deltas:
                        news.put_nowait((index, delta))
                news.put_nowait((index, None))
            except Exception as error:
                news.put_nowait((index, error))

        tasks = [asyncio.create_task(follow(index)) for index in range(len(requests))]
        try:
            num_open = len(tasks)
            while num_open:
                index, item = await news.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, requests: Sequence[PreparedRequest]) -> list[Answer]:
        """Gives the whole answers, in order."""
        texts: list[list[str]] = [[] for _ in requests]
        answers = [Answer() for _ in requests]
        async with aclosing(self.stream_all(requests)) as deltas:
            async for index, delta in deltas:
                texts[index].append(delta.text)
                answer = answers[index]
                answer.token_ids += delta.token_ids
                answer.num_cached_tokens = delta.num_cached_tokens
                answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        for answer, pieces in zip(answers, texts, strict=True):
            answer.text = "".join(pieces)
        return answers
