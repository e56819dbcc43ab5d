"""Steps an engine in the caller's own thread and hands what comes to those who wait. Knows no text."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxllm.api.errors import RequestError
from jaxllm.api.outputs import OutputDelta
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.engine import Engine
from jaxllm.scheduler.request import RequestUpdate


class Follower(Protocol):
    """Whoever takes the updates of a request."""

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    error: RequestError | None

    @property
    def sample_ids(self) -> tuple[str, ...]: ...
    @property
    def finished(self) -> bool: ...
    def take(self, update: RequestUpdate) -> OutputDelta: ...
    def end(self, reason: str) -> None: ...
    def take_left_over(self) -> tuple[str, ...]: ...


class EngineDriver:
    """An engine and the requests that it runs for this process. Not thread-safe: its owner takes turns."""

    def __init__(self, engine: Engine, on_step: Callable[[int], None] = lambda num_quiet: None):
        """`on_step` gets Engine.num_quiet_tokens after each step."""
        self._engine = engine
        self._on_step = on_step
        self._followers: dict[str, Follower] = {}  # by the ids of samples that the engine runs

    def add(self, follower: Follower, priority: int = 0) -> None:
        """Admits a request.

        Raises:
            InputError, AdmissionError: the engine refuses it.
        """
        prompt = follower.prompt
        self._engine.add(follower.request_id, prompt.token_ids, follower.params, priority, prompt.cache_salt)
        self._followers |= dict.fromkeys(follower.sample_ids, follower)

    def run(
        self, followers: Sequence[Follower], on_delta: Callable[[Follower, OutputDelta], None] | None = None
    ) -> None:
        """Steps until all of these have finished; others that the engine runs go on meanwhile.

        Raises:
            RequestError: a step raised; the error of the first request that it cost.
        """
        mine = {id(follower) for follower in followers}
        unfinished = {id(follower) for follower in followers if not follower.finished}
        while unfinished:
            assert self._engine.has_work, "a request neither runs nor has ended"
            for follower, delta in self.deliver(self._step()):
                if id(follower) in mine and on_delta is not None:
                    on_delta(follower, delta)
                if follower.finished:
                    unfinished.discard(id(follower))
        self._settle()
        failure = next((follower.error for follower in followers if follower.error is not None), None)
        if failure is not None:
            raise failure

    def cancel(self, followers: Sequence[Follower]) -> None:
        """Ends those of these that have not finished; afterwards the engine runs nothing of them."""
        for follower in followers:
            if not follower.finished:
                follower.end("abort")
                self._drop_left_over(follower)
        self._settle()

    def deliver(self, updates: Sequence[RequestUpdate]) -> list[tuple[Follower, OutputDelta]]:
        """Hands updates to those who wait for them; tells what came of each."""
        return [
            (follower, self._take(follower, update))
            for update in updates
            if (follower := self._followers.get(update.request_id)) is not None
        ]

    def _take(self, follower: Follower, update: RequestUpdate) -> OutputDelta:
        try:
            delta = follower.take(update)
        except RequestError:  # told at the end, by whoever waits for the request
            delta = OutputDelta()
        if update.finish_reason is not None:
            self._followers.pop(update.request_id, None)
        if delta.finish_reason is not None or follower.error is not None:
            self._drop_left_over(follower)
        return delta

    def _drop_left_over(self, follower: Follower) -> None:
        for sample_id in follower.take_left_over():
            self._engine.abort(sample_id)
            self._followers.pop(sample_id, None)

    def _settle(self) -> None:
        """Reads the steps that were launched for requests that have ended."""
        while not self._followers and self._engine.has_work:
            self._step()

    def _step(self) -> Sequence[RequestUpdate]:
        updates = self._engine.step()
        self._on_step(self._engine.num_quiet_tokens)
        return updates
