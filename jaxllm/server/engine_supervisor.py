"""Starts the engine's process, and starts it again when it dies. Knows processes and how often one may die; no request.

The fronts are told of a death; what they have accepted goes on with the next engine.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.server_args import ServerArgs
from jaxllm.engine.addresses import front_address
from jaxllm.engine.wire import Died, Ended, encode
from jaxllm.server.child_process import ChildProcess

logger = logging.getLogger(__name__)

ENGINE_COMMAND = ("-m", "jaxllm.server.engine_process")
MOST_DEATHS, WITHIN = 3, 300.0  # seconds: one more ends the server
_LAST_WORDS = 2000  # milliseconds


@dataclasses.dataclass(frozen=True, slots=True)
class EngineEnd:
    """Why there is no engine any more. `is_refusal`: it could not start, by a mistake of the user's.

    `is_told`: the engine's process has said so itself, on stderr.
    """

    line: str
    is_refusal: bool = False
    is_told: bool = False


class EngineSupervisor:
    """Keeps one engine running for the fronts that meet in a folder.

    `on_end` is called once when no engine will come any more, `on_leave` when the engine was told to stop by a signal,
    both on a thread of their own.
    """

    def __init__(
        self,
        args: EngineArgs,
        server_args: ServerArgs,
        folder: Path,
        *,
        on_end: Callable[[EngineEnd], None],
        on_leave: Callable[[], None],
        command: Sequence[str] | None = None,
    ):
        self.end: EngineEnd | None = None
        self._args, self._server_args = args, server_args
        self._folder, self._command = folder, command or ENGINE_COMMAND
        self._on_end, self._on_leave = on_end, on_leave
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._is_stopping = self._is_ready = False
        self._turn = threading.Lock()
        self._child: ChildProcess | None = None
        # It lives as long as the engine may: Linux takes the end of the thread that started it for the parent's.
        self._thread = threading.Thread(target=self._run, name="jaxllm-engine-supervisor", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Gives the process id of the engine that runs at present."""
        return None if self._child is None else self._child.pid

    def replace_front(self, front: int) -> None:
        """Has the engine end the requests of a front that is gone; another takes its place."""
        with self._turn:
            if self._child is not None:
                self._child.tell({"replace_front": front})

    def stop(self) -> bool:
        """Ends the engine; False if it did not end by itself."""
        with self._turn:
            self._is_stopping = True
            child = self._child
            is_ready = self._is_ready
        in_order = True
        if child is not None:
            if is_ready:
                in_order = child.stop()
            else:
                child.wait_or_kill(0.0)
        self._thread.join()
        return in_order

    def _run(self) -> None:
        context = zmq.Context()
        fronts = [context.socket(zmq.DEALER) for _ in range(self._server_args.api_server_count)]
        for index, socket in enumerate(fronts):
            socket.connect(front_address(self._folder, index))
        generation = 0
        while (message := self._run_one(generation)) is not None:
            for socket in fronts:
                with contextlib.suppress(zmq.Again):
                    socket.send(encode(message), zmq.NOBLOCK)
            if isinstance(message, Ended):
                assert self.end is not None
                self._on_end(self.end)
                break
            logger.error("%s", message.line)
            generation += 1
        for socket in fronts:
            socket.close(linger=_LAST_WORDS)
        context.term()

    def _run_one(self, generation: int) -> Died | Ended | None:
        """Runs one engine to its end; gives what the fronts are told of it, None when it was to end."""
        order = {
            "engine": dataclasses.asdict(self._args),
            "server": dataclasses.asdict(self._server_args),
            "folder": str(self._folder),
            "generation": generation,
        }
        with self._turn:
            if self._is_stopping:
                return None
            child = self._child = ChildProcess(self._command, order)
            self._is_ready = False
        cause, lost, refused = None, None, None
        for report in child.reports():
            self._is_ready = self._is_ready or "ready" in report
            cause, lost, refused = report.get("died", cause), report.get("lost", lost), report.get("refused", refused)
            if "leave" in report:
                self._on_leave()
        how = child.wait()
        with self._turn:
            self._child = None
            if self._is_stopping:
                return None
        has_started = self._is_ready or generation > 0
        if cause is not None:
            how = f"{how} ({cause})"
        self.end = self._judge(has_started, lost, refused, how)
        if self.end is not None:
            return Ended(self.end.line)
        return Died(f"the engine's process {how}; it is started again, and accepted requests go on then")

    def _judge(self, has_started: bool, lost: str | None, refused: str | None, how: str) -> EngineEnd | None:
        """Says whether this end is the last one, and why."""
        if refused is not None:
            return EngineEnd(refused, is_refusal=True)
        if lost is not None:
            return EngineEnd(lost, is_told=True)
        if not has_started:
            return EngineEnd(f"the engine's process {how} while it started", is_told="exit code" in how)
        if self._args.nnodes > 1:
            return EngineEnd(f"the engine's process {how}, and the engine's other processes end with it")
        now = time.monotonic()
        if len(self._deaths) == MOST_DEATHS and now - self._deaths[0] < WITHIN:
            return EngineEnd(
                f"the engine's process {how}, the {MOST_DEATHS + 1}th end within {now - self._deaths[0]:.0f} s: it is "
                "not started again"
            )
        self._deaths.append(now)
        return None
