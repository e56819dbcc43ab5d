"""A process that this one starts, talks to in lines of JSON, and takes along when it ends. Knows pipes; no engine."""

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LONGEST_END = 20.0  # seconds


class ChildProcess:
    """A process as its parent sees it. Its stdin is a pipe that closes with the parent, whatever ends that one."""

    def __init__(self, command: Sequence[str], order: dict[str, Any], open_files: Sequence[int] = ()):
        """Runs Python with a command line; `order` is the first thing it reads, `open_files` it may use."""
        reading, writing = os.pipe()
        # The same imports as here. In a session of its own: the terminal's Ctrl-C is for the parent, which tells it.
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", *command, str(writing), str(os.getpid())],
            stdin=subprocess.PIPE,
            pass_fds=[writing, *open_files],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        os.close(writing)
        self._reports = os.fdopen(reading)
        self._turn = threading.Lock()
        self.tell(order)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended_well(self) -> bool:
        """Says whether it has ended with exit code 0."""
        return self._process.returncode == 0

    def tell(self, order: dict[str, Any]) -> None:
        """Sends it an order; one that has died gets none."""
        assert self._process.stdin is not None
        with self._turn, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def reports(self) -> Iterator[dict[str, Any]]:
        """Yields what it reports until it ends."""
        for line in self._reports:
            yield json.loads(line)

    def wait(self) -> str:
        """Waits for its end and says how it ended."""
        code = self._process.wait()
        self._reports.close()
        if code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"was killed by signal {-code}"

    def signal(self, number: int) -> None:
        """Sends it a signal, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self, seconds: float = _LONGEST_END) -> bool:
        """Tells it to end and waits; kills it, and says False, if it takes longer than this."""
        self.tell({"stop": True})
        return self.wait_or_kill(seconds)

    def wait_or_kill(self, seconds: float) -> bool:
        """Waits for its end; kills it, and says False, if it takes longer than this."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True


def as_fields(told: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the fields of a dataclass of flags that came as JSON, which has no tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}


class Parent:
    """The parent as such a process sees it; orders behind the first go to `take`, on a thread of their own."""

    def __init__(self) -> None:
        self._reports = os.fdopen(int(sys.argv[-2]), "w")
        _die_with_parent(int(sys.argv[-1]))
        self.order: dict[str, Any] = json.loads(sys.stdin.readline())

    def report(self, **report: Any) -> None:
        """Tells the parent something."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, and so will this process
            self._reports.write(json.dumps(report) + "\n")
            self._reports.flush()

    def listen(self, take: Callable[[dict[str, Any]], None]) -> None:
        """Begins to take orders; ends the process when the parent has ended."""

        def run() -> None:
            for line in sys.stdin:
                take(json.loads(line))
            os._exit(1)

        threading.Thread(target=run, name="jaxllm-parent", daemon=True).start()


def _die_with_parent(parent: int) -> None:
    """Has Linux kill this process with its parent: a device that hangs may let no thread see the pipe close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
