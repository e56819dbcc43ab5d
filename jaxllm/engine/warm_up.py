"""Makes things ahead of their use, in threads, in the order given. Knows no shapes: it calls a function with each.

What is not begun yet can be dropped at any time; what is being made is waited for, since a compilation cannot be
interrupted. The threads end with the interpreter even if nobody stops them. Meanwhile Python's threads take turns more
often than usual: whoever serves waits for its turn several times in each step.
"""

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

_TURN = 1e-4  # seconds that a thread may go on while another waits, instead of Python's 5e-3


class WarmUp[T]:
    """Calls `make` with each of the keys, then `finish`; an error is logged, and left to whoever asks for the key."""

    def __init__(self, make: Callable[[T], object], keys: Iterable[T], num_threads: int, finish: Callable[[], object]):
        self.is_stopping = threading.Event()
        self._make, self._finish = make, finish
        self._left = deque(keys)
        self._done = threading.Event()
        threads = [
            threading.Thread(target=self._work, name="jaxllm-compile", daemon=True)
            for _ in range(min(num_threads, len(self._left)))
        ]
        self._num_working = len(threads)
        self._gate = threading.Lock()
        # A daemon thread inside XLA would crash the interpreter's end, a plain one would hold it up until all is made.
        self._end = weakref.finalize(self, _end, self.is_stopping, self._left, threads)
        self._threads = threads

    def start(self) -> None:
        """Begins."""
        if self._threads:
            _turns.shorten()
        else:
            self._end_all()
        for thread in self._threads:
            thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until nothing is left to be made; False if that takes longer than the timeout in seconds."""
        return self._done.wait(timeout)

    def stop(self) -> None:
        """Drops what is not begun and waits for the rest."""
        self._end()

    def _work(self) -> None:
        try:
            while True:
                key = self._left.popleft()
                try:
                    self._make(key)
                except Exception as error:
                    if self.is_stopping.is_set():
                        continue
                    lines = str(error).strip().splitlines() or ["no message"]
                    logger.warning("%s did not compile ahead: %s: %s", key, type(error).__name__, lines[0])
        except IndexError:
            with self._gate:
                self._num_working -= 1
                is_last = not self._num_working
            if is_last:
                _turns.restore()
                self._end_all()

    def _end_all(self) -> None:
        self._finish()
        self._done.set()


class _Turns:
    """The interpreter's switch interval, short as long as one of several warm-ups runs."""

    def __init__(self):
        self._lock = threading.Lock()
        self._num_short = 0
        self._usual = 0.0

    def shorten(self) -> None:
        with self._lock:
            if not self._num_short:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, _TURN))
            self._num_short += 1

    def restore(self) -> None:
        with self._lock:
            self._num_short -= 1
            if not self._num_short:
                sys.setswitchinterval(self._usual)


_turns = _Turns()


def _end(is_stopping: threading.Event, left: deque, threads: list[threading.Thread]) -> None:
    is_stopping.set()
    left.clear()
    for thread in threads:
        thread.join()
