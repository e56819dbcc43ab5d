"""What the requests of several fronts were given, added up: any of them can tell Prometheus. Knows files; no engine.

Each front writes its own books to a file now and then, and reads those of the others when it is asked.
"""

import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jaxllm.api.metrics import Counter, Histogram, Metric, RequestBooks, Vector
from jaxllm.engine.messages import EngineStats

logger = logging.getLogger(__name__)

_EVERY = 0.25  # seconds
_KINDS = {kind.__name__: kind for kind in (Counter, Histogram, Vector)}  # that are added up; gauges are the engine's


class PeerBooks:
    """The books of the other fronts as they wrote them last."""

    def __init__(self, folder: Path, index: int, count: int):
        self._own = folder / f"books-{index}"
        self._others = [folder / f"books-{other}" for other in range(count) if other != index]
        self._written = b""

    def keep(self, books: RequestBooks, model_name: str) -> None:
        """Begins to write this front's books, for as long as the process lives."""

        def run() -> None:
            while True:
                self.write(books, model_name)
                is_over.wait(_EVERY)

        is_over = threading.Event()
        threading.Thread(target=run, name="jaxllm-books", daemon=True).start()

    def write(self, books: RequestBooks, model_name: str) -> None:
        """Writes this front's books, if they have changed."""
        # What the engine counts would be told once for each front: here it has counted nothing.
        metrics = books.read(model_name, EngineStats())
        content = msgspec.json.encode([(type(each).__name__, dataclasses.asdict(each)) for each in metrics])
        if content == self._written:
            return
        self._written = content
        draft = self._own.with_suffix(".new")
        try:
            draft.write_bytes(content)
            os.replace(draft, self._own)
        except OSError as error:  # the server ends, and its folder is gone
            logger.debug("the books were not written: %s", error)

    def add(self, metrics: Sequence[Metric]) -> list[Metric]:
        """Adds what the others wrote to this front's readings."""
        told: dict[tuple[str, tuple[str, ...]], Metric] = {_key(metric): metric for metric in metrics}
        for path in self._others:
            for metric in _read(path):
                own = told.get(_key(metric))
                told[_key(metric)] = metric if own is None else _sum(own, metric)
        return list(told.values())


def _key(metric: Metric) -> tuple[str, tuple[str, ...]]:
    return metric.name, tuple(metric.labels.values())


def _read(path: Path) -> list[Metric]:
    try:
        content: list[tuple[str, dict[str, Any]]] = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:  # it has not begun
        return []
    return [msgspec.convert(fields, _KINDS[kind]) for kind, fields in content if kind in _KINDS]


def _sum(first: Metric, second: Metric) -> Metric:
    match first, second:
        case Counter(), Counter():
            return dataclasses.replace(first, value=first.value + second.value)
        case Vector(), Vector():
            return dataclasses.replace(first, values=[a + b for a, b in zip(first.values, second.values, strict=True)])
        case Histogram(), Histogram():
            buckets = {bound: count + second.buckets[bound] for bound, count in first.buckets.items()}
            return dataclasses.replace(
                first, count=first.count + second.count, sum=first.sum + second.sum, buckets=buckets
            )
    return first
