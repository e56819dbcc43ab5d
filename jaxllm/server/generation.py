"""Runs prepared requests on an EngineClient, several side by side. Knows deltas; no HTTP, no JSON."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from jaxllm.api.engine_client import EngineClient
from jaxllm.api.errors import EngineDeadError, RequestError
from jaxllm.api.logprobs import PositionLogprobs, PromptLogprobs
from jaxllm.api.outputs import OutputDelta
from jaxllm.server.crash_dump import CrashDumps
from jaxllm.server.deadline import Deadline
from jaxllm.server.in_flight import InFlight
from jaxllm.server.prepare import PreparedRequest
from jaxllm.server.request_log import RequestLog


@dataclass(slots=True)
class Answer:
    """All that one sample was given; the prompt's log-probabilities are with the sample whose token came first."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Answers:
    """All samples of one request."""

    samples: list[Answer]
    num_cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None


class Generator:
    """The engine as routes use it. Leaving an iteration, or cancelling a call, aborts the request."""

    def __init__(self, llm: EngineClient, in_flight: InFlight, dumps: CrashDumps, log: RequestLog):
        self._llm = llm
        self._in_flight = in_flight
        self._dumps = dumps
        self._log = log

    async def stream(self, request: PreparedRequest) -> AsyncGenerator[OutputDelta]:
        """Yields what comes new for one request; one whose deadline has passed ends with the stop reason "timeout".

        Raises:
            ApiError: the deadline passed before the first token.
            RequestError, EngineDeadError: it was lost, with the cause.
        """
        record = self._in_flight.open(request)
        deadline = Deadline(self._llm, request)
        texts: list[str] | None = [] if self._log.has_outputs else None
        self._log.begin(request)
        try:
            deadline.start()
            async with aclosing(self._llm.stream(*request.as_arguments())) as deltas:
                async for delta in deltas:
                    record.take(delta.token_ids, delta.finish_reason)
                    if texts is not None:
                        texts.append(delta.text)
                    yield deadline.explain(delta, record.num_output_tokens)
        except (EngineDeadError, RequestError) as error:
            record.finish_reason = "error"
            self._dumps.write(error)
            raise
        finally:
            deadline.cancel()
            record.finish_reason = record.finish_reason or "abort"
            self._in_flight.close(record)
            self._log.end(record, texts)

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

    async def run(self, requests: Sequence[PreparedRequest]) -> list[Answers]:
        """Gives the whole answers, in order."""
        texts: list[list[list[str]]] = [[[] for _ in range(request.params.n)] for request in requests]
        answers = [Answers([Answer() for _ in range(request.params.n)]) for request in requests]
        async with aclosing(self.stream_all(requests)) as deltas:
            async for index, delta in deltas:
                texts[index][delta.index].append(delta.text)
                _add(answers[index], delta)
        for answer, pieces in zip(answers, texts, strict=True):
            for sample, text in zip(answer.samples, pieces, strict=True):
                sample.text = "".join(text)
        return answers


def _add(answers: Answers, delta: OutputDelta) -> None:
    sample = answers.samples[delta.index]
    sample.token_ids += delta.token_ids
    sample.logprobs += delta.logprobs or ()
    sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
    if delta.index == 0:
        answers.num_cached_tokens = delta.num_cached_tokens
    if delta.prompt_logprobs is not None:
        answers.prompt_logprobs = delta.prompt_logprobs
