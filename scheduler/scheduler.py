"""Chooses the tokens of each step and follows what came of them. Knows integers: no device, no text, no sampling.

The engine may schedule step n+1 before it has read the tokens of step n. What makes that right is that the device runs
the steps in the order in which they were scheduled: a row or a block taken from a request may be given to another one
at once, since every step that still uses it for its first owner runs before those of the second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Literal

from jaxllm.scheduler.admission import AdmissionError, check_new, checked_max_new_tokens
from jaxllm.scheduler.batch import Counters, Scheduled, ScheduledBatch, SchedulerStats
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.deadlines import Deadlines
from jaxllm.scheduler.kv_cache import KVCache
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.record import blank
from jaxllm.scheduler.request import FinishReason, Request, RequestStatus, RequestUpdate, WeightVersion
from jaxllm.scheduler.roster import Roster
from jaxllm.scheduler.snapshot import VERSION, Encode, place_requests, plain_requests, unchanged
from jaxllm.scheduler.step_planner import StepPlanner

__all__ = ["AdmissionError", "Scheduled", "ScheduledBatch", "Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Requests on their way from waiting to running to finished, and the rows and blocks they hold meanwhile."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, groups: KVGroups, pace: Pace | None = None) -> None:
        self.config = config
        self._kv = KVCache(pool, groups, config.largest_chunk, config.enable_prefix_caching)
        self._roster = Roster(config.make_policy(), config.max_num_seqs)
        self._counters = Counters()
        self._planner = StepPlanner(config, self._kv, self._roster, self._counters, pace)
        self._deadlines = Deadlines()
        self._is_paused = False
        self.weight_version: WeightVersion = 0  # stamped on what is sampled
        self._last_scheduled = 0
        self._last_updated = 0

    @property
    def has_work(self) -> bool:
        """Says whether a step could bring anything on, now or once those in flight are read."""
        return not self._is_paused and len(self._roster.living) > self._roster.num_paused

    @property
    def is_paused(self) -> bool:
        """Says whether all scheduling is paused; requests may come and go meanwhile."""
        return self._is_paused

    @property
    def living(self) -> Mapping[str, Request]:
        """Gives the requests that have not ended, by id."""
        return MappingProxyType(self._roster.living)

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            paused=self._roster.num_paused,
            kv_usage=self._kv.pool.usage,
            **asdict(self._counters),
        )

    @property
    def kv_utilisation(self) -> float:
        """Gives the share of the lent slots that hold a token; the rest is the internal waste of blocks."""
        return self._kv.utilisation(self._roster.running)

    def add(self, request: Request) -> None:
        """Puts a new request behind those waiting and clips its max_new_tokens to the model's length.

        Raises:
            AdmissionError: the request could never run to its end, or its id belongs to a living one.
        """
        self.add_group((request,))

    def add_group(self, requests: Sequence[Request]) -> None:
        """Puts the samples of one prompt behind those waiting: the first computes it, the others share its blocks.

        Raises:
            AdmissionError: one of them could never run, an id is taken, or their prompts differ; none is added then.
        """
        names = [request.request_id for request in requests]
        for index, name in enumerate(names):
            if name in self._roster.living or name in names[:index]:
                raise AdmissionError(f"request id {name!r} belongs to a request that has not ended yet")
        check_new(requests)
        limits = [checked_max_new_tokens(request, self.config.max_model_len, self._kv) for request in requests]
        for request, limit in zip(requests, limits, strict=True):
            request.limit(limit)
            request.block_tables = self._kv.groups.empty_tables()
            self._kv.prepare(request)
        self._roster.enter(requests)
        for request in requests:
            self._deadlines.add(request, len(self._roster.living))

    def schedule(self) -> ScheduledBatch | None:
        """Chooses the tokens of the next step and counts them as computed; None when nothing can run.

        None while `has_work` means that the tokens of a dispatched step have to be read first.
        """
        if self._is_paused:
            return None
        draft = self._planner.plan()
        if not draft.items:
            return None
        self._last_scheduled += 1
        return ScheduledBatch(
            tuple(draft.items),
            tuple(draft.preempted),
            self._last_scheduled,
            tuple(draft.copies),
            draft.num_recomputed,
            tuple(draft.admitted),
            tuple(draft.grown),
        )

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[RequestUpdate]:
        """Reads the tokens of a step, one per item; batches must come in the order in which they were scheduled."""
        if len(token_ids) != len(batch.items):
            raise ValueError(f"step {batch.step} has {len(batch.items)} items, got {len(token_ids)} token ids")
        if batch.step <= self._last_updated:
            raise ValueError(f"step {batch.step} came after step {self._last_updated} was read")
        self._last_updated = batch.step
        updates: list[RequestUpdate] = []
        finished, version = RequestStatus.FINISHED, self.weight_version
        for item, token in zip(batch.items, token_ids, strict=True):
            if not item.samples:
                continue
            request = item.request
            if request.status is finished:  # stopped, aborted or failed after this step was dispatched
                self._counters.num_discarded_tokens += 1
                continue
            output_ids = request.output_ids
            output_ids.append(token)
            num_output = len(output_ids)
            reason, stop_reason = None, None
            if token in request.end_token_ids:
                reason, stop_reason = "stop", None if token in request.eos_token_ids else token
            elif num_output >= request.max_new_tokens:
                reason = "length"
            if reason is not None:
                self._end(request, reason, stop_reason)
            update = blank(RequestUpdate)
            update.request_id = request.request_id
            update.token_ids = (token,)
            update.finish_reason = reason
            update.stop_reason = stop_reason
            update.error = None
            update.num_prompt_tokens = request.num_prompt
            update.num_output_tokens = num_output
            update.num_cached_tokens = request.num_cached_tokens
            update.first_scheduled_time = request.first_scheduled_time
            update.scores = None
            update.weight_version = version
            updates.append(update)
        return updates

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Ends a request wherever it stands; None when no living one has this id."""
        request = self._roster.living.get(request_id)
        return None if request is None else self._end_without_token(request, "abort")

    def expire(self, now: float) -> list[RequestUpdate]:
        """Ends the requests whose deadline has come, wherever they stand."""
        return [
            self._end_without_token(
                request,
                "abort",
                f"the deadline {request.deadline} passed (it is {now}) after {len(request.output_ids)} of at most "
                f"{request.max_new_tokens} output tokens: allow more time or ask for fewer tokens",
            )
            for request in self._deadlines.due(now)
        ]

    def fail(self, batch: ScheduledBatch, error: str) -> list[RequestUpdate]:
        """Ends the requests of a step that raised, but for those which ended before, and forgets all cached prefixes.

        Others may hold blocks that the step was to write: `recompute_all` has to follow unless it did write them.
        """
        living = [item.request for item in batch.items if item.request.status is not RequestStatus.FINISHED]
        updates = [self._end_without_token(request, "error", error) for request in living]
        self._kv.pool.forget_all()
        return updates

    def recompute_all(self, in_flight: Sequence[ScheduledBatch]) -> None:
        """Starts every running request anew, in order and ahead of those waiting, after the device lost its state.

        `in_flight` names the dispatched steps whose tokens will never arrive.
        """
        for batch in in_flight:
            for item in batch.items:
                if item.samples and item.request.status is not RequestStatus.FINISHED:
                    item.request.num_tokens -= 1
        for request in tuple(self._roster.running):
            self._planner.send_back(request)
        self._kv.pool.forget_all()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing happens, while requests hold blocks."""
        if self._kv.pool.num_lent:
            return False
        self._kv.pool.forget_all()
        return True

    def pause(self, request_id: str) -> bool:
        """Takes a request aside until it is resumed: it keeps its tokens, those on their way included, and no KV."""
        request = self._roster.living.get(request_id)
        if request is None or request.status is RequestStatus.PAUSED:
            return False
        if request.status is RequestStatus.RUNNING:
            self._kv.drop(request)
        self._roster.pause(request)
        return True

    def resume(self, request_id: str) -> bool:
        """Puts a paused request back in the line, where it would stand by now."""
        request = self._roster.living.get(request_id)
        if request is None or request.status is not RequestStatus.PAUSED:
            return False
        self._roster.resume(request)
        return True

    def pause_all(self, mode: Literal["keep", "drop"]) -> None:
        """Schedules nothing until `resume_all`: "keep" leaves rows and KV as they are, "drop" gives all KV up.

        After a drop no prefix is remembered either, so the weights may change meanwhile.
        """
        if mode not in ("keep", "drop"):
            raise ValueError(f"mode must be 'keep' or 'drop', got {mode!r}")
        self._is_paused = True
        if mode == "drop":
            self.recompute_all(())

    def change_weights(self, version: WeightVersion, kv: Literal["keep", "drop", "recompute"]) -> list[RequestUpdate]:
        """Takes note that all steps from here on run on other weights; none may be in flight.

        What runs goes on with the KV that it has ("keep"), is computed again ("recompute"), or ends, wherever it has
        begun ("drop"). No prefix of older weights is found any more, nor remembered later. Gives what ended.
        """
        ended: list[RequestUpdate] = []
        if kv == "drop":
            begun = [r for r in self._roster.living.values() if r.status is RequestStatus.RUNNING or r.output_ids]
            ended = [self._end_without_token(request, "abort") for request in begun]
        elif kv == "recompute":
            for request in tuple(self._roster.running):
                self._planner.send_back(request)
        self._kv.begin_generation()
        self.weight_version = version
        return ended

    def resume_all(self) -> None:
        self._is_paused = False

    def snapshot(self, encode_params: Encode = unchanged) -> dict[str, Any]:
        """Gives all requests with their tokens as plain data, from which `restore` continues; `params` by the encoder.

        A policy that was passed in as an object is not part of it.
        """
        return {
            "version": VERSION,
            "config": asdict(self.config) if isinstance(self.config.policy, str) else None,
            "is_paused": self._is_paused,
            "num_arrived": self._roster.num_arrived,
            "requests": plain_requests(self._roster, encode_params),
        }

    @classmethod
    def restore(
        cls,
        snapshot: dict[str, Any],
        pool: BlockPool,
        groups: KVGroups,
        config: SchedulerConfig | None = None,
        decode_params: Encode = unchanged,
    ) -> "Scheduler":
        """Makes a scheduler that continues from a snapshot, all requests waiting; `config` overrides the snapshot's.

        Raises:
            AdmissionError: a request does not fit the new limits.
            ValueError: the snapshot is of another version, or brings no config and none is given.
        """
        if snapshot["version"] != VERSION:
            raise ValueError(f"the snapshot has version {snapshot['version']}; this is version {VERSION}")
        if config is None:
            if snapshot["config"] is None:
                raise ValueError("the snapshot's policy was an object; pass a config with a new one")
            fields = snapshot["config"]
            config = SchedulerConfig(**fields | {"step_sizes": tuple(fields.get("step_sizes", ()))})
        scheduler = cls(config, pool, groups)
        requests = place_requests(snapshot["requests"], scheduler._roster, decode_params, scheduler._check_restored)
        for request in requests:
            request.block_tables = groups.empty_tables()
            scheduler._deadlines.add(request, len(requests))
        scheduler._roster.num_arrived = snapshot["num_arrived"]
        scheduler._is_paused = snapshot["is_paused"]
        return scheduler

    def check(self) -> None:
        """Every row and block belongs to whom it was given, and every count fits the others."""
        self._roster.check()
        self._kv.check(self._roster.running)

    def _check_restored(self, request: Request) -> None:
        if checked_max_new_tokens(request, self.config.max_model_len, self._kv) < request.max_new_tokens:
            raise AdmissionError(
                f"request {request.request_id!r} may have {request.num_prompt} + {request.max_new_tokens} tokens, "
                f"but max_model_len is {self.config.max_model_len} now: restore with a larger one"
            )

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | None = None) -> None:
        self._kv.release(request)
        self._roster.end(request)
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def _end_without_token(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestUpdate:
        self._end(request, reason)
        return RequestUpdate(
            request.request_id,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=request.num_prompt,
            num_output_tokens=len(request.output_ids),
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            weight_version=self.weight_version,
        )
