"""Starts the processes that answer HTTP, and another where one dies. Knows processes; no request and no engine."""

import dataclasses
import logging
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.child_process import ChildProcess

logger = logging.getLogger(__name__)

FRONT_COMMAND = ("-m", "jaxllm.server.front_process")
MOST_DEATHS, WITHIN = 3, 300.0  # seconds: one more ends the server
_LAST_WORDS = 10.0  # seconds beyond those that running requests have


class FrontSupervisor:
    """Keeps `api_server_count` fronts running on one listening socket.

    `on_death` is called with the index of one that died, before another takes its place; `on_end` when none will.
    """

    def __init__(
        self,
        engine_args: EngineArgs,
        args: ServerArgs,
        folder: Path,
        bound: socket.socket,
        on_death: Callable[[int], None],
        on_end: Callable[[], None],
    ):
        self.end: str | None = None
        self._order = {
            "engine": dataclasses.asdict(engine_args),
            "server": dataclasses.asdict(args),
            "folder": str(folder),
            "socket": bound.fileno(),
        }
        self._drain_seconds = args.shutdown_timeout
        self._on_death, self._on_end = on_death, on_end
        self._turn = threading.Lock()
        self._is_stopping = False
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._children: dict[int, ChildProcess] = {}
        # Each lives as long as its front may: Linux takes the end of the thread that started it for the parent's.
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"jaxllm-front-{index}", daemon=True)
            for index in range(args.api_server_count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Gives the process ids of the fronts that run at present, by index."""
        with self._turn:
            return [self._children[index].pid for index in sorted(self._children)]

    def stop(self) -> None:
        """Has every front let its requests end, and waits for that."""
        with self._turn:
            self._is_stopping = True
            children = list(self._children.values())
        for child in children:
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._drain_seconds + _LAST_WORDS
        for child in children:
            child.wait_or_kill(max(deadline - time.monotonic(), 0.0))
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        is_first = True
        while (how := self._run_one(index, is_first)) is not None:
            now = time.monotonic()
            with self._turn:
                if len(self._deaths) == MOST_DEATHS and now - self._deaths[0] < WITHIN:
                    self.end = f"front {index} {how}, the {MOST_DEATHS + 1}th end of a front within {WITHIN:g} s"
                self._deaths.append(now)
            if self.end is not None:
                self._on_end()
                return
            logger.error("front %d %s; its requests end, and another takes its place", index, how)
            self._on_death(index)
            is_first = False

    def _run_one(self, index: int, is_first: bool) -> str | None:
        """Runs one front to its end; says how it ended, None when it was to end."""
        with self._turn:
            if self._is_stopping:
                return None
            order = {**self._order, "index": index, "greets": is_first and index == 0}
            child = self._children[index] = ChildProcess(FRONT_COMMAND, order, (self._order["socket"],))
        how = child.wait()
        with self._turn:
            del self._children[index]
            return None if self._is_stopping or child.has_ended_well else how
