"""The processes of a server: the engine in one of its own, HTTP in this one or in several. Knows the order of a start
and of an end; what each process does stands elsewhere.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from jaxllm.api.errors import EngineDeadError
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.engine_supervisor import EngineSupervisor
from jaxllm.server.front_supervisor import FrontSupervisor

logger = logging.getLogger(__name__)

_LONGEST_FOLDER = 80  # characters: a socket's name has room for 107
_FAILED, _INTERRUPTED = 1, 130  # exit codes; the second is what a shell reports of a program that SIGINT ended


def serve_here(bound: socket.socket, engine_args: EngineArgs, args: ServerArgs) -> int:
    """Answers HTTP in this process; gives the exit code.

    Raises:
        InputError: the engine cannot start, by a mistake of the user's.
    """
    has_started = threading.Event()

    def stop() -> None:
        if has_started.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    with _sigterm_ends_a_start(), _socket_folder() as folder:
        supervisor = EngineSupervisor(engine_args, args, folder, on_end=lambda _: stop(), on_leave=stop)
        try:
            from jaxllm.server.front import run_front  # takes a second, in which the engine's process starts

            code = run_front(bound, folder, 0, engine_args, args, greets=True, on_start=has_started.set)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun
        except EngineDeadError:
            code = _FAILED
        finally:
            in_order = supervisor.stop()
        return code if in_order and supervisor.end is None else _tell_end(supervisor)


def serve_in_processes(bound: socket.socket, engine_args: EngineArgs, args: ServerArgs) -> int:
    """Answers HTTP in several processes and waits for the end; gives the exit code.

    Raises:
        InputError: the engine cannot start, by a mistake of the user's.
    """
    told = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if told.is_set() and number == signal.SIGINT:
            os._exit(_INTERRUPTED)  # the others end with this process
        told.set()

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with _socket_folder() as folder:
            supervisor = EngineSupervisor(engine_args, args, folder, on_end=lambda _: told.set(), on_leave=told.set)
            fronts = FrontSupervisor(engine_args, args, folder, bound, supervisor.replace_front, on_end=told.set)
            told.wait()
            fronts.stop()
            in_order = supervisor.stop()
            if fronts.end is not None and supervisor.end is None:
                print(f"jaxllm: {fronts.end}", file=sys.stderr)
                return _FAILED
            return 0 if in_order and supervisor.end is None else _tell_end(supervisor)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _tell_end(supervisor: EngineSupervisor) -> int:
    """Says in one line why a server ends that was not told to; gives the exit code.

    Raises:
        InputError: by a mistake of the user's.
    """
    end = supervisor.end
    if end is None:
        logger.error("the engine did not end in time, so it was killed")
    elif end.is_refusal:
        raise InputError(end.line)
    elif not end.is_told:
        print(f"jaxllm: {end.line}", file=sys.stderr)
    return _FAILED


@contextmanager
def _socket_folder() -> Iterator[Path]:
    """Gives a folder that nobody else may enter, and removes it."""
    with tempfile.TemporaryDirectory(prefix="jaxllm-") as folder:
        if len(folder) > _LONGEST_FOLDER:
            raise InputError(
                f"the folder for temporary files, {tempfile.gettempdir()}, has too long a name for sockets "
                f"({len(folder)} characters of at most {_LONGEST_FOLDER}): set TMPDIR to another"
            )
        yield Path(folder)


@contextmanager
def _sigterm_ends_a_start() -> Iterator[None]:
    """Has SIGTERM end this process in order also before it serves, when it is not yet an order to drain."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
