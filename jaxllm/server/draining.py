"""uvicorn with a shutdown that drains. Knows signals and time; no routes, no engine."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Generator
from types import FrameType
from typing import Any

import uvicorn

logger = logging.getLogger(__name__)

INTERRUPTED = 130  # what a shell reports of a program that SIGINT ended
_AFTER_ABORT = 5.0  # seconds in which aborted requests may send their last words
_TICK = 0.5  # seconds between two looks at connections that are to close


class DrainingServer(uvicorn.Server):
    """Runs an app until SIGINT or SIGTERM, then lets running requests end for a while and aborts what is left.

    While it drains, new connections are refused. A second SIGINT ends the process at once.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        drain_seconds: float,
        on_ready: Callable[[], None],
        abort_all: Callable[[], Awaitable[int]],
    ):
        config.timeout_graceful_shutdown = drain_seconds + _AFTER_ABORT  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._on_ready = on_ready
        self._abort_all = abort_all

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logger.info("stopping: running requests have %g s to end", self._drain_seconds)
        tasks = [asyncio.create_task(self._abort_late()), asyncio.create_task(self._cut_idle_connections())]
        try:
            await super().shutdown(sockets)
        finally:
            for task in tasks:
                task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Takes both signals as orders to stop; uvicorn would raise them again at the end, and exit with their code."""
        if threading.current_thread() is not threading.main_thread():  # which alone may listen for signals
            yield
            return
        handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            os._exit(INTERRUPTED)  # a step may hang on the device, so nothing is waited for
        self.should_exit = True

    async def _cut_idle_connections(self) -> None:
        """Cuts connections that have nothing left to send: over TLS, asyncio waits 30 s for a client's goodbye."""
        idle: set[Any] = set()
        while True:
            await asyncio.sleep(_TICK)
            still = {connection for connection in self.server_state.connections if _has_said_all(connection)}
            for connection in idle & still:
                connection.transport.abort()
            idle = still

    async def _abort_late(self) -> None:
        await asyncio.sleep(self._drain_seconds)
        num_aborted = await self._abort_all()
        if num_aborted:
            logger.warning("aborted %d request(s) that still ran after %g s", num_aborted, self._drain_seconds)


def _has_said_all(connection: Any) -> bool:
    """Says of one of uvicorn's connections that no request runs on it and that all is sent."""
    cycle, transport = connection.cycle, connection.transport
    is_done = cycle is None or cycle.response_complete
    return is_done and transport is not None and not transport.get_write_buffer_size()
