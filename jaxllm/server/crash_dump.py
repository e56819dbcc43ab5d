"""A file about the last requests, for whoever looks for the cause of a failure. Knows records; no text unless asked."""

import dataclasses
import json
import logging
import os
import time
from pathlib import Path

from jaxllm import __version__
from jaxllm.config.errors import InputError
from jaxllm.server.in_flight import InFlight

logger = logging.getLogger(__name__)

_LEAST_SECONDS_BETWEEN = 60.0  # one failure fails many requests


class CrashDumps:
    """Writes such files to a folder; without one it writes none.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(self, directory: str | None, in_flight: InFlight):
        self._directory = None if directory is None else Path(directory)
        self._in_flight = in_flight
        self._last = -_LEAST_SECONDS_BETWEEN
        if self._directory is not None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"crash_dump_dir={directory!r} cannot be made: {error.strerror}") from None

    def write(self, cause: BaseException) -> Path | None:
        """Writes one file, unless another was written in the last minute; gives its path."""
        if self._directory is None or time.monotonic() - self._last < _LEAST_SECONDS_BETWEEN:
            return None
        self._last = time.monotonic()
        path = self._directory / f"jaxllm-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
        records = [dataclasses.asdict(record) for record in self._in_flight.remembered()]
        told = {
            "time": time.time(),
            "version": __version__,
            "cause": f"{type(cause).__name__}: {cause}",
            "requests": [{name: value for name, value in each.items() if value is not None} for each in records],
        }
        try:
            path.write_text(json.dumps(told, indent=1, default=repr))
        except OSError as error:
            logger.error("cannot write %s: %s", path, error.strerror)
            return None
        logger.error("the engine failed; %s has the last %d requests", path, len(records))
        return path
