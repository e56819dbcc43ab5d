"""The engine on its own thread for asyncio programs: submit a prompt, iterate over what comes. Knows no HTTP."""

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from jaxllm.api.errors import EngineDeadError, RequestError
from jaxllm.api.outputs import OutputDelta, RequestOutput
from jaxllm.api.prompts import Prompt, TokenizedPrompt, tokenize_prompt
from jaxllm.api.request_stream import RequestStream
from jaxllm.api.start import Started, start_engine
from jaxllm.config.engine_args import EngineArgs, engine_args
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.engine import EngineLimits
from jaxllm.engine.loop import EngineLoop
from jaxllm.engine.messages import AbortRequests, AddRequest, EngineStats, ResetPrefixCache
from jaxllm.scheduler.request import RequestUpdate
from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class _Listener:
    """One request's stream, and the event loop and queue on which its updates are awaited."""

    def __init__(self, stream: RequestStream):
        self.stream = stream
        self.event_loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[RequestUpdate | Exception] = asyncio.Queue()


class AsyncLLM:
    """Generates for many callers at once, on any number of event loops. Keyword arguments are those of LLM.

    Raises:
        InputError: an unknown option, or a model or value that does not fit, in one line.
    """

    def __init__(self, model: str = "smollm2", **options: Any):
        self._start(start_engine(engine_args({"model": model, **options})))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLM":
        """Starts an engine from checked arguments."""
        self = cls.__new__(cls)
        self._start(start_engine(args))
        return self

    @classmethod
    def from_started(cls, started: Started) -> "AsyncLLM":
        """Wraps an engine that runs already."""
        self = cls.__new__(cls)
        self._start(started)
        return self

    def _start(self, started: Started) -> None:
        self._built, self._tokenizer = started
        self._listeners: dict[str, _Listener] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._is_shut_down = False
        self._loop = EngineLoop(self._built.engine, self._publish, self._on_death)

    @property
    def limits(self) -> EngineLimits:
        """What requests are checked against."""
        return self._built.engine.limits

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters as of its last step."""
        return self._loop.stats

    def report(self) -> list[tuple[str, str]]:
        """The start-up table: label and value."""
        return self._built.report()

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine's loop ended, or a step does not return."""
        self._check_alive()
        if self._loop.hanging is not None:
            raise EngineDeadError(f"the engine hangs: {self._loop.hanging}")

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The fields of SamplingParams of which the model's generation_config.json speaks."""
        return self._built.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling_params get."""
        return SamplingParams(**self.sampling_defaults)

    def get_tokenizer(self) -> Tokenizer | None:
        """Gives the tokenizer, or None with skip_tokenizer_init."""
        return self._tokenizer

    async def generate(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the whole output so far whenever something came; the last one is finished.

        Leaving the iteration, or cancelling the task, aborts the request.

        Raises:
            InputError: the request cannot be accepted.
            RequestError, EngineDeadError: it was lost, with the cause.
        """
        params = sampling_params or self.get_default_sampling_params()
        stream = self._make_stream(prompt, params, request_id)
        async with aclosing(self._deltas(stream, params, priority)) as deltas:
            async for _ in deltas:
                yield stream.output()

    async def stream(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[OutputDelta]:
        """As `generate`, but yields only what came new: the cost per token does not grow with the length."""
        params = sampling_params or self.get_default_sampling_params()
        stream = self._make_stream(prompt, params, request_id)
        async with aclosing(self._deltas(stream, params, priority)) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: str) -> None:
        """Ends a request; whoever iterates over it gets a last output with finish_reason "abort"."""
        self._loop.send(AbortRequests((request_id,)))

    async def abort_all(self) -> int:
        """Ends every request that runs or waits, as `abort` does; gives how many those are."""
        with self._lock:
            request_ids = tuple(self._listeners)
        self._loop.send(AbortRequests(request_ids))
        return len(request_ids)

    async def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes, unless requests hold blocks just then."""
        self._loop.send(ResetPrefixCache())

    def shutdown(self) -> None:
        """Ends the engine; requests that still run end with EngineDeadError."""
        self._is_shut_down = True
        self._loop.stop()
        self._fail_all(EngineDeadError("the engine was shut down"))
        self._built.close()

    def _check_alive(self) -> None:
        if self._loop.died is not None:
            raise EngineDeadError(f"the engine died: {self._loop.died}")
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")

    def _make_stream(
        self, prompt: Prompt | TokenizedPrompt, params: SamplingParams, request_id: str | None
    ) -> RequestStream:
        self.check_health()
        tokenized = prompt if isinstance(prompt, TokenizedPrompt) else tokenize_prompt(prompt, self._tokenizer)
        self.limits.check(tokenized.token_ids, params)
        request_id = request_id or f"async-{next(self._numbers)}"
        if request_id in self._listeners:
            raise InputError(f"request id {request_id!r} belongs to a request that has not ended yet")
        return RequestStream(request_id, tokenized, params, self._tokenizer)

    async def _deltas(
        self, stream: RequestStream, params: SamplingParams, priority: int
    ) -> AsyncGenerator[OutputDelta]:
        listener = _Listener(stream)
        with self._lock:
            self._listeners[stream.request_id] = listener
        try:
            # Whoever ends the engine tells the listeners of that moment; one who comes later has to look.
            self._check_alive()
            prompt = stream.prompt
            self._loop.send(AddRequest(stream.request_id, prompt.token_ids, params, priority, prompt.cache_salt))
            while not stream.finished:
                news = await listener.queue.get()
                if isinstance(news, Exception):
                    stream.finished = True
                    raise news
                delta = stream.take(news)
                if delta.token_ids or delta.text or stream.finished:
                    yield delta
        finally:
            with self._lock:
                self._listeners.pop(stream.request_id, None)
            if not stream.finished or stream.stopped_by_text:
                self._loop.send(AbortRequests((stream.request_id,)))

    def _publish(self, updates: list[RequestUpdate]) -> None:
        """On the engine's thread: hands each event loop its updates of the step in one call."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, RequestUpdate | Exception]]] = {}
        with self._lock:
            for update in updates:
                listener = self._listeners.get(update.request_id)
                if listener is not None:
                    by_loop.setdefault(listener.event_loop, []).append((listener, update))
        for event_loop, deliveries in by_loop.items():
            _call_soon(event_loop, deliveries)

    def _on_death(self, error: BaseException) -> None:
        self._fail_all(EngineDeadError(f"the engine died: {type(error).__name__}: {error}"))

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            listeners = list(self._listeners.values())
        for listener in listeners:
            _call_soon(listener.event_loop, [(listener, error)])


def _call_soon(
    event_loop: asyncio.AbstractEventLoop, deliveries: list[tuple[_Listener, RequestUpdate | Exception]]
) -> None:
    def deliver() -> None:
        for listener, news in deliveries:
            listener.queue.put_nowait(news)

    try:
        event_loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # that loop is closed, and nobody waits there any more
        logger.debug("dropped %d update(s) for a closed event loop", len(deliveries))


__all__ = ["AsyncLLM", "EngineDeadError", "RequestError"]
