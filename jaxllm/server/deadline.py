"""Ends a request when its time is over. Knows one request and a clock; no HTTP."""

import asyncio
import dataclasses
import time

from jaxllm.api.engine_client import EngineClient
from jaxllm.api.outputs import OutputDelta
from jaxllm.server.errors import ApiError
from jaxllm.server.prepare import PreparedRequest

TIMED_OUT = "timeout"


class Deadline:
    """The deadline of one request, if it has one."""

    def __init__(self, llm: EngineClient, request: PreparedRequest):
        self._llm = llm
        self._request = request
        self._timer: asyncio.TimerHandle | None = None
        self._abort: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to watch the clock.

        Raises:
            ApiError: the time is over already.
        """
        if self._request.deadline is None:
            return
        left = self._request.deadline - time.monotonic()
        if left <= 0:
            raise _too_late()
        self._timer = asyncio.get_running_loop().call_later(left, self._end)

    def cancel(self) -> None:
        """Watches no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def explain(self, delta: OutputDelta, num_tokens: int) -> OutputDelta:
        """Says of a last delta that the deadline was its cause.

        Raises:
            ApiError: it was, and the request has no token to show.
        """
        if self._abort is None or delta.finish_reason != "abort":
            return delta
        if not num_tokens:
            raise _too_late()
        return dataclasses.replace(delta, stop_reason=TIMED_OUT)

    def _end(self) -> None:
        self._abort = asyncio.ensure_future(self._llm.abort(self._request.request_id))


def _too_late() -> ApiError:
    return ApiError(
        "the request's time was over before its first token: allow it more, or try again when less is asked",
        status=504,
        code="deadline_exceeded",
    )
