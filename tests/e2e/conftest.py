"""Engines on the golden models, driven request by request."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxllm import SamplingParams
from jaxllm.config.engine_args import engine_args
from jaxllm.engine.build import BuiltEngine, build_engine
from jaxllm.engine.model_source import find_model
from jaxllm.engine.scores import TokenScores

GOLDEN = Path(__file__).parents[1] / "golden"


def cases(family: str) -> list[dict]:
    return json.loads((GOLDEN / family / "golden.json").read_text())["cases"]


class Driver:
    """Runs requests through an engine and collects their tokens and ends."""

    def __init__(self, built: BuiltEngine):
        self.built = built
        self.engine = built.engine
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.errors: dict[str, str | None] = {}
        self.scores: dict[str, list[TokenScores]] = {}
        self.prompt_scores: dict[str, tuple[TokenScores | None, ...]] = {}

    def add(self, name: str, prompt_ids: list[int], params: SamplingParams) -> None:
        self.tokens[name] = []
        self.engine.add(name, prompt_ids, params)

    def abort(self, name: str) -> None:
        self._take([update for update in [self.engine.abort(name)] if update is not None])

    def step(self) -> None:
        self._take(self.engine.step())
        self.engine.scheduler.check()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.engine.scheduler.stats.kv_usage == 0.0

    def _take(self, updates) -> None:
        for update in updates:
            assert update.request_id not in self.ends, "a request ended twice"
            self.tokens[update.request_id] += update.token_ids
            if update.scores is not None:
                self.scores.setdefault(update.request_id, []).extend(update.scores.tokens)
                if update.scores.prompt is not None:
                    assert update.request_id not in self.prompt_scores, "a prompt was told twice"
                    self.prompt_scores[update.request_id] = update.scores.prompt
            if update.finish_reason is not None:
                self.ends[update.request_id] = update.finish_reason
                self.errors[update.request_id] = update.error


@pytest.fixture(scope="session")
def engine_of(pad_to_the_largest):
    @contextmanager
    def running_engine(family: str, *, few_shapes: bool = False, **options: Any) -> Iterator[Driver]:
        args = engine_args({"model": str(GOLDEN / family), "dtype": "float32", "enforce_eager": True, **options})
        built = build_engine(args, find_model(args))
        if few_shapes:
            pad_to_the_largest(built)
        try:
            yield Driver(built)
        finally:
            built.close()

    return running_engine


@pytest.fixture(scope="session")
def golden_cases():
    return cases
