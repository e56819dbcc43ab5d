"""The engine's loop: schedule, build inputs, execute, update, one step ahead of the host.

Knows the scheduler, the input builder and a runner; no model, no text, no HTTP. Not thread-safe: one thread drives it.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.input_builder import InputBuilder
from jaxllm.engine.model_runner import PendingTokens, Runner
from jaxllm.engine.watchdog import Watchdog
from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.request import Request, RequestUpdate
from jaxllm.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """Stands in for the tokens of a step that never reached the device."""

    error: Exception

    def read(self) -> list[int]:
        raise self.error


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on the device whose tokens have not been read."""

    batch: ScheduledBatch
    tokens: PendingTokens
    name: str


@dataclass(slots=True)
class StepTimes:
    """Where the host's time went, in seconds since the start."""

    schedule: float = 0.0
    build: float = 0.0
    execute: float = 0.0
    wait: float = 0.0
    update: float = 0.0
    num_steps: int = 0
    num_padded_tokens: int = 0  # computed in vain, to fill the steps' compiled shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine checks a request against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    has_priorities: bool = False  # the scheduling policy looks at a request's priority

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Refuses a request that the model cannot take.

        Raises:
            InputError: an empty prompt, one that leaves no room for output, or token ids outside the vocabulary.
        """
        if not prompt_ids:
            raise InputError("the prompt is empty; it needs at least 1 token")
        if len(prompt_ids) >= self.max_model_len:
            raise InputError(
                f"the prompt has {len(prompt_ids):,} tokens, but max_model_len {self.max_model_len:,} leaves room for "
                f"{self.max_model_len - 1:,} and one output token: shorten the prompt or raise max_model_len"
            )
        for name, ids in (("prompt", prompt_ids), ("stop_token_ids", params.stop_token_ids or [])):
            if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
                place, wrong = next((i, token) for i, token in enumerate(ids) if not 0 <= token < self.vocab_size)
                raise InputError(
                    f"{name}: token id {wrong} at position {place} is outside the vocabulary of {self.vocab_size:,}"
                )


class Engine:
    """Takes token ids, gives RequestUpdates. Every accepted request ends with exactly one finish_reason."""

    def __init__(
        self, scheduler: Scheduler, builder: InputBuilder, runner: Runner, limits: EngineLimits, watchdog: Watchdog
    ):
        self.scheduler = scheduler
        self.limits = limits
        self.times = StepTimes()
        self._builder = builder
        self._runner = runner
        self._watchdog = watchdog
        self._in_flight: deque[Launched] = deque()

    @property
    def has_work(self) -> bool:
        """Says whether a request lives or a launched step is still to be read."""
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def hanging(self) -> str | None:
        """Names the step that does not return, if there is one."""
        return self._watchdog.overdue

    def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> None:
        """Admits a request to the waiting queue. Requests of different cache_salt never share KV blocks.

        At its deadline, in seconds of time.monotonic(), it ends wherever it stands with the reason "abort".

        Raises:
            InputError: see EngineLimits.check.
            AdmissionError: it could never fit, with the numbers.
        """
        self.scheduler.add(self._request(request_id, prompt_ids, params, priority, cache_salt, deadline))

    def add_samples(
        self,
        request_ids: Sequence[str],
        prompt_ids: list[int],
        params: Sequence[SamplingParams],
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Admits several samples of one prompt: it is computed once, and its blocks are shared.

        Raises:
            InputError, AdmissionError: as `add`; none is admitted then.
        """
        named = zip(request_ids, params, strict=True)
        self.scheduler.add_group([self._request(i, prompt_ids, p, priority, cache_salt, None) for i, p in named])

    def _request(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None,
        deadline: float | None,
    ) -> Request:
        self.limits.check(prompt_ids, params)
        if params.seed is None and not params.greedy:
            params = params.replace(seed=self._builder.draw_seed())
        room = self.limits.max_model_len - len(prompt_ids)
        return Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            max_new_tokens=max(room, 1) if params.max_tokens is None else params.max_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else frozenset(self.limits.eos_token_ids),
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            priority=priority,
            arrival_time=time.monotonic(),
            params=params,
            cache_salt=cache_salt,
            deadline=deadline,
        )

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Ends a request at once; None if it has ended already."""
        return self.scheduler.abort(request_id)

    def step(self) -> list[RequestUpdate]:
        """Launches the next step, then reads the tokens of the one before."""
        expired = self.scheduler.expire(time.monotonic())
        batch = self._schedule()
        if batch is not None:
            self._in_flight.append(self._launch(batch))
        if len(self._in_flight) > (batch is not None):
            return expired + self._read_oldest()
        return expired

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing happens, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Ends the watchdog; the runner belongs to whoever made it."""
        self._watchdog.close()

    def _schedule(self) -> ScheduledBatch | None:
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        self.times.schedule += time.perf_counter() - start
        return batch

    def _launch(self, batch: ScheduledBatch) -> Launched:
        """Sends a step to the device. What raises here is raised when its tokens are read, after those before it."""
        start = time.perf_counter()
        name = f"step {batch.step}"
        try:
            inputs = self._builder.build(batch)
            built = time.perf_counter()
            name = f"step {batch.step} ({inputs.shape})"
            with self._watchdog.watching(lambda: describe(name, batch)):
                tokens = self._runner.execute(inputs)
            self.times.num_padded_tokens += inputs.shape.num_tokens - batch.num_tokens
            self.times.build += built - start
            self.times.execute += time.perf_counter() - built
        except Exception as error:
            tokens = FailedLaunch(error)
        self.times.num_steps += 1
        return Launched(batch, tokens, name)

    def _read_oldest(self) -> list[RequestUpdate]:
        launched = self._in_flight.popleft()
        start = time.perf_counter()
        try:
            with self._watchdog.watching(lambda: describe(launched.name, launched.batch)):
                tokens = launched.tokens.read()
        except Exception as error:
            return self._recover(launched, error)
        read = time.perf_counter()
        updates = self.scheduler.update(launched.batch, tokens[: len(launched.batch.items)])
        self.times.wait += read - start
        self.times.update += time.perf_counter() - read
        return updates

    def _recover(self, failed: Launched, error: Exception) -> list[RequestUpdate]:
        """A step raised: its requests end with the cause, all others are computed again on fresh device state."""
        lines = str(error).strip().splitlines()
        cause = f"{failed.name} failed: {type(error).__name__}: {lines[0] if lines else 'no message'}"
        logger.error("%s; %d request(s) end with it", cause, len(failed.batch.items), exc_info=error)
        updates = self.scheduler.fail(failed.batch, cause)
        self.scheduler.recompute_all([launched.batch for launched in self._in_flight])
        self._in_flight.clear()
        self._builder.forget_rows()
        self._runner.reset()
        return updates


def describe(name: str, batch: ScheduledBatch) -> str:
    """Names a step and the first of its requests."""
    ids = [item.request.request_id for item in batch.items]
    return f"{name} with {len(ids)} request(s) {', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''}"
