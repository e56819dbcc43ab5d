"""Who awaits what the engine brings, and on which event loop. Knows updates and replies; sends the engine nothing."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from jaxllm.api.request_stream import RequestStream
from jaxllm.engine.messages import EngineOutput, EngineReply
from jaxllm.engine.scores import RequestScores
from jaxllm.scheduler.request import RequestUpdate

logger = logging.getLogger(__name__)

type News = RequestUpdate | Exception

_FALLEN_BEHIND = 8  # updates that wait for a reader


class Listener:
    """One request's stream, and the event loop on which its updates are awaited.

    `ended` is done when the engine has no more of its samples, whether or not their updates have been read.
    """

    def __init__(self, stream: RequestStream):
        self.stream = stream
        self.num_in_engine = len(stream.sample_ids)
        self.event_loop = asyncio.get_running_loop()
        self.ended: Future[None] = Future()
        self._mail: deque[News] = deque()
        self._is_awaited: asyncio.Future[None] | None = None

    def put(self, news: News) -> None:
        """Takes in what comes; to be called on the event loop."""
        self._mail.append(news)
        if self._is_awaited is not None and not self._is_awaited.done():
            self._is_awaited.set_result(None)

    async def next(self) -> News:
        """Waits for what comes next; for a reader that has fallen behind, all that came for a sample is one piece."""
        mail = self._mail
        while not mail:
            self._is_awaited = self.event_loop.create_future()
            await self._is_awaited
        news = mail.popleft()
        if len(mail) < _FALLEN_BEHIND:
            return news
        while mail and (joined := join(news, mail[0])) is not None:
            news = joined
            mail.popleft()
        return news


def join(first: News, second: News) -> RequestUpdate | None:
    """Makes one update of two that came one after the other; None where they are better told apart."""
    if not isinstance(first, RequestUpdate) or not isinstance(second, RequestUpdate):
        return None
    if first.request_id != second.request_id or first.finish_reason is not None or second.error is not None:
        return None
    if second.token_ids and first.token_ids and first.weight_version != second.weight_version:
        return None
    scores = first.scores
    if second.scores is not None:
        if scores is None or second.scores.prompt is not None:
            return None
        scores = RequestScores(scores.tokens + second.scores.tokens, scores.prompt)
    elif scores is not None and second.token_ids:
        return None
    return RequestUpdate(
        first.request_id,
        first.token_ids + second.token_ids,
        second.finish_reason,
        second.stop_reason,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        first_scheduled_time=first.first_scheduled_time or second.first_scheduled_time,
        scores=scores,
        weight_version=first.weight_version if first.token_ids else second.weight_version,
    )


class Listeners:
    """All who wait, for requests or for the replies to calls. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_request: dict[str, Listener] = {}
        self._by_sample: dict[str, Listener] = {}
        self._calls: dict[int, Future[EngineReply]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def __len__(self) -> int:
        return len(self._by_request) + len(self._calls)

    def get(self, request_id: str) -> Listener | None:
        """Finds the listener of a request."""
        return self._by_request.get(request_id)

    def all(self) -> list[Listener]:
        """Gives the listeners of all requests."""
        with self._lock:
            return list(self._by_request.values())

    def add(self, listener: Listener) -> None:
        """Takes in a listener before its request is sent."""
        with self._lock:
            self._by_request[listener.stream.request_id] = listener
            self._by_sample |= dict.fromkeys(listener.stream.sample_ids, listener)

    def remove(self, listener: Listener) -> None:
        """Forgets a listener; whoever waits for the end of its request waits no longer."""
        with self._lock:
            self._by_request.pop(listener.stream.request_id, None)
            for sample_id in listener.stream.sample_ids:
                self._by_sample.pop(sample_id, None)
            _settle(listener.ended)

    def expect_reply(self, call_id: int) -> Future[EngineReply]:
        """Gives what will hold the reply to a call."""
        with self._lock:
            return self._calls.setdefault(call_id, Future())

    def forget_reply(self, call_id: int) -> None:
        """Lets a reply go, where nobody waits for it any more."""
        with self._lock:
            self._calls.pop(call_id, None)

    def publish(self, outputs: Sequence[EngineOutput]) -> None:
        """Hands each event loop what concerns it of a step in one call."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Listener, News]]] = {}
        replies: list[tuple[Future[EngineReply], EngineReply]] = []
        with self._lock:
            for output in outputs:
                if isinstance(output, EngineReply):
                    future = self._calls.pop(output.call_id, None)
                    if future is not None:
                        replies.append((future, output))
                    continue
                listener = self._by_sample.get(output.request_id)
                if listener is None:
                    continue
                by_loop.setdefault(listener.event_loop, []).append((listener, output))
                if output.finish_reason is not None:
                    listener.num_in_engine -= 1
                    if listener.num_in_engine == 0:
                        _settle(listener.ended)
        for event_loop, deliveries in by_loop.items():
            _call_soon(event_loop, deliveries)
        for future, reply in replies:
            if future.set_running_or_notify_cancel():
                future.set_result(reply)

    def abort(self, listener: Listener) -> None:
        """Ends a request that the engine has never got."""
        with self._lock:
            _settle(listener.ended)
        updates = [RequestUpdate(name, finish_reason="abort") for name in listener.stream.sample_ids]
        _call_soon(listener.event_loop, [(listener, update) for update in updates])

    def fail_all(self, error: Exception) -> None:
        """Tells everyone that nothing more will come."""
        with self._lock:
            listeners, calls = list(self._by_request.values()), list(self._calls.values())
            self._calls.clear()
            for listener in listeners:
                _settle(listener.ended, error)
        for listener in listeners:
            _call_soon(listener.event_loop, [(listener, error)])
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _settle(future: Future[None], error: Exception | None = None) -> None:
    """Completes a future that may have been completed already."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _call_soon(event_loop: asyncio.AbstractEventLoop, deliveries: list[tuple[Listener, News]]) -> None:
    def deliver() -> None:
        for listener, news in deliveries:
            listener.put(news)

    try:
        event_loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # that loop is closed, and nobody waits there any more
        logger.debug("dropped %d update(s) for a closed event loop", len(deliveries))
