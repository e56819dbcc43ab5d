"""Makes things ahead of their use, in threads, in the order given. Knows no shapes: it calls a function with each.

What is not begun yet can be dropped at any time; what is being made is waited for, since a compilation cannot be
interrupted. The threads end with the interpreter even if nobody stops them.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)


class WarmUp[T]:
    """Calls `make` with each of the keys, then `finish`; an error is logged, and left to whoever asks for the key."""

    def __init__(self, make: Callable[[T], object], keys: Iterable[T], num_threads: int, finish: Callable[[], object]):
        self._make, self._finish = make, finish
        self._left = deque(keys)
        self._done = threading.Event()
        threads = [
            threading.Thread(target=self._work, name="jaxllm-compile", daemon=True)
            for _ in range(min(num_threads, len(self._left)))
        ]
        self._num_working = len(threads)
        self._gate = threading.Lock()
        if not threads:
            self._end_all()
        # A daemon thread inside XLA would crash the interpreter's end, a plain one would hold it up until all is made.
        self._end = weakref.finalize(self, _end, self._left, threads)
        for thread in threads:
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
                    lines = str(error).strip().splitlines() or ["no message"]
                    logger.warning("%s did not compile ahead: %s: %s", key, type(error).__name__, lines[0])
        except IndexError:
            with self._gate:
                self._num_working -= 1
                is_last = not self._num_working
            if is_last:
                self._end_all()

    def _end_all(self) -> None:
        self._finish()
        self._done.set()


def _end(left: deque, threads: list[threading.Thread]) -> None:
    left.clear()
    for thread in threads:
        thread.join()
