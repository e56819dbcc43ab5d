"""The engine's loop: schedule, build inputs, execute, update, one step ahead of the host.

Knows the scheduler, the input builder and a runner; no text, no HTTP, of weights that there are some. Not thread-safe:
one thread drives it.
"""

import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.engine.input_builder import InputBuilder, PackedStep, PromptScoring
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.messages import STEP_SIZES, sample_ids
from jaxllm.engine.model_runner import PendingTokens, Runner
from jaxllm.engine.profile import Spans, start_trace, stop_trace
from jaxllm.engine.score_book import ScoreBook
from jaxllm.engine.watchdog import Watchdog
from jaxllm.models.given import Params
from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.request import Request, RequestUpdate, WeightVersion
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.updates import StepUpdates

logger = logging.getLogger(__name__)

type KVMode = Literal["keep", "drop", "recompute"]
KV_MODES = ("keep", "drop", "recompute")

_UTILISATION_EVERY = 16  # steps between two readings of how full the blocks are


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """Stands in for the tokens of a step that never reached the device."""

    error: Exception

    def read(self) -> list[list[int]]:
        raise self.error

    def read_scores(self) -> None:
        raise self.error


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on the device whose tokens have not been read."""

    batch: ScheduledBatch
    tokens: PendingTokens
    inputs: PackedStep | None = None  # None where they could not be built

    @property
    def name(self) -> str:
        """Names the step and its shape, if it got one."""
        return name_of(self.batch, self.inputs)

    @property
    def prompt(self) -> PromptScoring | None:
        """Which tokens of prompts it scores."""
        return self.inputs.prompt if self.inputs else None


@dataclass(slots=True)
class RankTokens:
    """Tokens that the steps of a data rank had room for: those of requests, and padding."""

    num_computed: int = 0
    num_padded: int = 0


@dataclass(slots=True)
class StepTimes:
    """Where the host's time went, in seconds since the start."""

    schedule: float = 0.0
    build: float = 0.0
    execute: float = 0.0
    wait: float = 0.0
    update: float = 0.0
    num_steps: int = 0
    tokens_by_rank: list[RankTokens] = field(default_factory=list)
    steps_by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))
    num_batched_requests: int = 0  # summed over the steps
    kv_usage_peak: float = 0.0  # share of the blocks that was lent at most
    kv_utilisation_sum: float = 0.0  # of every 16th step
    num_utilisation_samples: int = 0

    @property
    def num_padded_tokens(self) -> int:
        """Counts the tokens computed in vain on all data ranks, to fill the steps' compiled shapes."""
        return sum([counted.num_padded for counted in self.tokens_by_rank])

    @property
    def kv_utilisation(self) -> float:
        """The mean share of the lent slots that held a token."""
        return self.kv_utilisation_sum / max(self.num_utilisation_samples, 1)


class Engine:
    """Takes token ids, gives RequestUpdates. Every accepted request ends with exactly one finish_reason."""

    def __init__(
        self,
        scheduler: Scheduler,
        builder: InputBuilder,
        runner: Runner,
        limits: EngineLimits,
        watchdog: Watchdog,
        pace: Pace | None = None,
    ):
        self.scheduler = scheduler
        self.limits = limits
        self.times = StepTimes()
        self._builder = builder
        self._runner = runner
        self._watchdog = watchdog
        self._pace = pace  # the scheduler's, which is told here what steps take
        self._busy_since: float | None = None  # when the device began with the oldest step in flight, if that is known
        self._scores = ScoreBook()
        self._span = Spans()
        self._in_flight: deque[Launched] = deque()
        self._owed: list[RequestUpdate] = []  # told with the next step's
        self.num_quiet_tokens = 0  # of all steps so far; see StepUpdates
        self._last_number = 0  # of the versions of the weights, those with a text counted as one more

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
        outputs: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Admits a request to the waiting queue. Requests of different cache_salt never share KV blocks.

        With n > 1 it becomes n requests named by `sample_ids`, whose prompt is computed once. At its deadline, in
        seconds of time.monotonic(), it ends wherever it stands with the reason "abort". `outputs` tells of a request
        that another engine began which samples still run and what tokens each has: they go on behind them, and get the
        same tokens as there if the request brings a seed.

        With output_kind FINAL_ONLY it may be told its first token, and all others at once when it ends.

        Raises:
            InputError: see EngineLimits.check.
            AdmissionError: it could never fit, with the numbers.
        """
        self.limits.check(prompt_ids, params)
        seed = params.seed
        if seed is None:
            seed = 0 if params.greedy else self._builder.draw_seed()
        room = max(self.limits.max_model_len - len(prompt_ids), 1)
        now = time.monotonic()
        names = sample_ids(request_id, params.n)
        # What comes with a token is looked for in each step: a stop string in its text, its scores.
        is_scored = params.logprobs is not None or params.logprob_token_ids or params.prompt_logprobs is not None
        is_quiet = params.output_kind is RequestOutputKind.FINAL_ONLY and not params.stop and not is_scored
        if outputs and outputs.get(names[0], True):
            params = params.replace(prompt_logprobs=None)  # they came with the first token
        requests = [
            Request(
                request_id=name,
                prompt_ids=prompt_ids,
                max_new_tokens=room if params.max_tokens is None else params.max_tokens,
                eos_token_ids=frozenset() if params.ignore_eos else frozenset(self.limits.eos_token_ids),
                stop_token_ids=frozenset(params.stop_token_ids or ()),
                priority=priority,
                arrival_time=now,
                params=params if params.greedy else params.replace(seed=(seed + sample) % 2**64),
                cache_salt=cache_salt,
                deadline=deadline,
                # A token that is found in the cache is not computed, so nothing is known of the one behind it.
                skip_prefix_cache=params.skip_reading_prefix_cache or params.prompt_logprobs is not None,
                output_ids=list(outputs.get(name, ())) if outputs else [],
                is_quiet=is_quiet,
            )
            for sample, name in enumerate(names)
            if outputs is None or name in outputs
        ]
        if outputs is None:
            self.scheduler.add_group(requests)
        else:
            for request in requests:
                self.scheduler.take_over(request)
        if params.prompt_logprobs is not None:
            self._scores.expect(names[0], len(prompt_ids))

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Ends a request at once; None if it has ended already."""
        update = self.scheduler.abort(request_id)
        self._scores.forget([update] if update is not None else [])
        return update

    def step(self) -> StepUpdates:
        """Launches the next step, then reads the tokens of the one before."""
        expired = self.scheduler.expire(time.monotonic())
        self._scores.forget(expired)
        owed, self._owed = self._owed + expired, []
        batch = self._schedule()
        if batch is not None:
            for part in batch.ranks:
                for request in part.admitted:
                    request.first_scheduled_time = request.first_scheduled_time or time.monotonic()
            self._in_flight.append(self._launch(batch))
        if len(self._in_flight) > (batch is not None):
            return self._read_oldest().behind(owed)
        return StepUpdates([owed] if owed else [])

    @property
    def is_paused(self) -> bool:
        """Says whether nothing is scheduled until `resume`; requests may come and go meanwhile."""
        return self.scheduler.is_paused

    def pause(self, mode: Literal["keep", "drop"] = "keep") -> list[RequestUpdate]:
        """Schedules nothing until `resume`: "keep" leaves the KV of what runs, "drop" gives it up, prefixes included.

        Gives what the steps under way brought; none is left in flight.
        """
        updates = []
        while self._in_flight:
            updates += self._read_oldest()
        self.scheduler.pause_all(mode)
        return updates

    def resume(self) -> None:
        """Goes on after a pause."""
        self.scheduler.resume_all()

    @property
    def weights(self) -> Any:
        """The tree of arrays that the model runs on."""
        return self._runner.weights

    @property
    def weight_version(self) -> WeightVersion:
        """The version of the weights in use, which is stamped on every update."""
        return self.scheduler.weight_version

    def update_weight_version(self, version: WeightVersion) -> None:
        """Gives the weights in use another version.

        Raises:
            InputError: it is neither a whole number nor a text.
        """
        version = self._checked_version(version)
        self._owed += self.scheduler.tell_untold()
        self.scheduler.weight_version = version

    def update_params(
        self, params: Params, kv: KVMode = "recompute", version: WeightVersion | None = None, casts: bool = True
    ) -> list[RequestUpdate]:
        """Runs on other weights from the next step on; gives what the steps under way brought, and what ended.

        What runs is computed again ("recompute"), its tokens stay; or goes on with the KV that it has ("keep"); or ends
        with the tokens that it has ("drop"), wherever it has begun. Cached prefixes are forgotten in any case. Without
        a version it is the last number, plus one.

        Raises:
            InputError: an array is missing, is not expected, or has another shape or type, or see above; the weights
                are the same as before then, and nothing has ended.
        """
        if kv not in KV_MODES:
            raise InputError(f"kv must be one of {', '.join(KV_MODES)}, got {kv!r}")
        version = self._last_number + 1 if version is None else self._checked_version(version)
        taken = self._runner.take_weights(params, casts)
        was_paused = self.is_paused
        updates = self.pause("keep")
        self._runner.set_weights(taken.tree)
        ended = self.scheduler.change_weights(version, kv)
        self._scores.forget(ended)
        self._last_number = version if isinstance(version, int) else self._last_number + 1
        if not was_paused:
            self.resume()
        return updates + ended

    def _checked_version(self, version: WeightVersion) -> WeightVersion:
        if isinstance(version, bool) or not isinstance(version, int | str):
            raise InputError(f"version must be a whole number or a text, got {version!r:.80}")
        return version

    def start_profile(self, directory: str, python_calls: bool = True) -> None:
        """Begins a jax profiler trace, to be written below the directory, with the parts of each step marked."""
        start_trace(directory, python_calls)
        self._span.is_on = True

    def stop_profile(self) -> None:
        """Ends the trace and writes it."""
        self._span.is_on = False
        stop_trace()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing happens, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Ends the watchdog; the runner belongs to whoever made it."""
        self._watchdog.close()

    def _schedule(self) -> ScheduledBatch | None:
        start = time.perf_counter()
        with self._span("schedule"):
            batch = self.scheduler.schedule()
        self.times.schedule += time.perf_counter() - start
        return batch

    def _launch(self, batch: ScheduledBatch) -> Launched:
        """Sends a step to the device. What raises here is raised when its tokens are read, after those before it."""
        start = time.perf_counter()
        inputs = None
        try:
            with self._span("build"):
                inputs = self._builder.build(batch)
            built = time.perf_counter()
            with (
                self._watchdog.watching(lambda: describe(name_of(batch, inputs), batch)),
                self._span("execute", inputs.shape),
            ):
                tokens = self._runner.execute(inputs)
            self._count_tokens(inputs)
            self.times.build += built - start
            self.times.execute += time.perf_counter() - built
        except Exception as error:
            tokens = FailedLaunch(error)
        self.times.num_steps += 1
        self.times.num_batched_requests += batch.num_requests
        if self.times.num_steps % _UTILISATION_EVERY == 1:
            self._sample_utilisation()
        return Launched(batch, tokens, inputs)

    def _count_tokens(self, inputs: PackedStep) -> None:
        times = self.times
        if len(times.tokens_by_rank) != len(inputs.num_tokens):
            times.tokens_by_rank = [RankTokens() for _ in inputs.num_tokens]
        times.steps_by_size[bisect_left(STEP_SIZES, sum(inputs.num_tokens))] += 1
        for counted, num_tokens in zip(times.tokens_by_rank, inputs.num_tokens, strict=True):
            counted.num_computed += num_tokens
            counted.num_padded += inputs.shape.num_tokens - num_tokens

    def _sample_utilisation(self) -> None:
        times, usage = self.times, self.scheduler.stats.kv_usage
        times.kv_usage_peak = max(times.kv_usage_peak, usage)
        times.kv_utilisation_sum += self.scheduler.kv_utilisation
        times.num_utilisation_samples += 1

    def _read_oldest(self) -> StepUpdates:
        launched = self._in_flight.popleft()
        start = time.perf_counter()
        try:
            with self._watchdog.watching(lambda: describe(launched.name, launched.batch)), self._span("wait"):
                tokens = launched.tokens.read()
                scores = launched.tokens.read_scores()
        except Exception as error:
            return StepUpdates([self._recover(launched, error)])
        read = time.perf_counter()
        self._tell_pace(launched, read)
        with self._span("update"):
            updates = self.scheduler.update(launched.batch, own_tokens(launched.batch, tokens))
            self._scores.add(launched.batch, tokens, launched.prompt, scores, updates)
        self.num_quiet_tokens += updates.num_quiet
        self.times.wait += read - start
        self.times.update += time.perf_counter() - read
        return updates

    def _tell_pace(self, launched: Launched, read: float) -> None:
        """Tells what a step took, from the end of the one before; nothing where the device had to wait for it."""
        if self._pace is not None and self._busy_since is not None and launched.inputs is not None:
            shape = launched.inputs.shape
            self._pace.time.observe(
                shape.num_tokens, shape.program == "decode", launched.inputs.num_context, read - self._busy_since
            )
        self._busy_since = read if self._in_flight else None

    def _recover(self, failed: Launched, error: Exception) -> list[RequestUpdate]:
        """A step raised: its requests end with the cause, all others are computed again on fresh device state."""
        lines = str(error).strip().splitlines()
        cause = f"{failed.name} failed: {type(error).__name__}: {lines[0] if lines else 'no message'}"
        logger.error("%s; %d request(s) end with it", cause, failed.batch.num_requests, exc_info=error)
        updates = self.scheduler.fail(failed.batch, cause)
        self._scores.forget(updates)
        self._busy_since = None
        self.scheduler.recompute_all([launched.batch for launched in self._in_flight])
        self._in_flight.clear()
        self._runner.reset()
        return updates


def own_tokens(batch: ScheduledBatch, tokens: Sequence[Sequence[int]]) -> Sequence[int]:
    """Gives the tokens of a step's items, of what each data rank told, padding included."""
    own = [of_rank[: part.num_requests] for part, of_rank in zip(batch.ranks, tokens, strict=True)]
    return own[0] if len(own) == 1 else list(chain.from_iterable(own))


def name_of(batch: ScheduledBatch, inputs: PackedStep | None) -> str:
    """Names a step and its shape, if it got one."""
    return f"step {batch.step}" if inputs is None else f"step {batch.step} ({inputs.shape})"


def describe(name: str, batch: ScheduledBatch) -> str:
    """Names a step and the first of its requests."""
    ids = [item.request.request_id for item in batch.items]
    return f"{name} with {len(ids)} request(s) {', '.join(ids[:4])}{', ...' if len(ids) > 4 else ''}"
