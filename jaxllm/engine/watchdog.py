"""Notices a step that does not return, and says which. Knows names and times: it can't stop what runs on a device."""

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches one thing at a time; `overdue` names it while it is late."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._watched: tuple[Callable[[], str], float] | None = None
        self._lock = threading.Lock()  # a body that ends while it is found late must not stay overdue
        self._stop = threading.Event()
        self.overdue: str | None = None
        self._thread = threading.Thread(target=self._run, name="jaxllm-watchdog", daemon=True)
        self._thread.start()

    def watching(self, describe: Callable[[], str]) -> "Watchdog":
        """Watches the body of a with statement that begins at once; `describe` is called only if it is late."""
        self._watched = (describe, time.monotonic())
        return self

    def __enter__(self) -> None:
        """Nothing is left to do: what is watched begins with `watching`."""

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._watched, overdue, self.overdue = None, self.overdue, None
        if overdue is not None:
            logger.warning("went on after all: %s", overdue)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(self._timeout / 4, 1.0)):
            with self._lock:
                if self._watched is None or self.overdue is not None:
                    continue
                describe, since = self._watched
                seconds = time.monotonic() - since
                if seconds < self._timeout:
                    continue
                late = f"{describe()} has not returned for {seconds:.1f} s (step_timeout {self._timeout:g} s)"
                self.overdue = late
            logger.error("hanging: %s", late)
