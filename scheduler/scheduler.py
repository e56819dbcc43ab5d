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
from jaxllm.scheduler.batch import Counters, Scheduled, ScheduledBatch, SchedulerStats, StepDraft
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.deadlines import Deadlines
from jaxllm.scheduler.kv_cache import KVCache, Prefix
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.policy import room_to_return
from jaxllm.scheduler.request import FinishReason, Request, RequestStatus, RequestUpdate
from jaxllm.scheduler.roster import Roster
from jaxllm.scheduler.snapshot import VERSION, Encode, from_plain, to_plain, unchanged

__all__ = ["AdmissionError", "Scheduled", "ScheduledBatch", "Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Requests on their way from waiting to running to finished, and the rows and blocks they hold meanwhile."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, groups: KVGroups) -> None:
        self.config = config
        self._kv = KVCache(pool, groups, config.largest_chunk, config.enable_prefix_caching)
        self._roster = Roster(config.make_policy(), config.max_num_seqs)
        self._deadlines = Deadlines()
        self._counters = Counters()
        self._is_paused = False
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
        counters = self._counters
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            paused=self._roster.num_paused,
            kv_usage=self._kv.pool.usage,
            num_preemptions=counters.num_preemptions,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_discarded_tokens=counters.num_discarded_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_forked_tokens=counters.num_forked_tokens,
            num_refound_tokens=counters.num_refound_tokens,
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
            request.max_new_tokens = limit
            request.block_tables = self._kv.groups.empty_tables()
        self._roster.enter(requests)
        for request in requests:
            self._deadlines.add(request, len(self._roster.living))

    def schedule(self) -> ScheduledBatch | None:
        """Chooses the tokens of the next step and counts them as computed; None when nothing can run.

        None while `has_work` means that the tokens of a dispatched step have to be read first.
        """
        if self._is_paused:
            return None
        self._roster.release_siblings()
        draft = StepDraft(self.config.max_num_batched_tokens, self.config.prefill_share)
        self._continue_running(draft)
        self._admit_waiting(draft)
        if not draft.items:
            return None
        self._last_scheduled += 1
        self._counters.num_scheduled_tokens += self.config.max_num_batched_tokens - draft.num_left
        self._counters.num_recomputed_tokens += draft.num_recomputed
        return ScheduledBatch(
            tuple(draft.items), tuple(draft.preempted), self._last_scheduled, tuple(draft.copies), draft.num_recomputed
        )

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[RequestUpdate]:
        """Reads the tokens of a step, one per item; batches must come in the order in which they were scheduled."""
        if len(token_ids) != len(batch.items):
            raise ValueError(f"step {batch.step} has {len(batch.items)} items, got {len(token_ids)} token ids")
        if batch.step <= self._last_updated:
            raise ValueError(f"step {batch.step} came after step {self._last_updated} was read")
        self._last_updated = batch.step
        updates: list[RequestUpdate] = []
        finished = RequestStatus.FINISHED
        for item, token in zip(batch.items, token_ids, strict=True):
            if not item.samples:
                continue
            request = item.request
            if request.status is finished:  # stopped, aborted or failed after this step was dispatched
                self._counters.num_discarded_tokens += 1
                continue
            request.num_in_flight -= 1
            output_ids = request.output_ids
            output_ids.append(token)
            num_prompt, num_output = len(request.prompt_ids), len(output_ids)
            if num_prompt + num_output >= request.cache_at:
                self._kv.remember(request)
            reason, stop_reason = None, None
            if token in request.eos_token_ids:
                reason = "stop"
            elif token in request.stop_token_ids:
                reason, stop_reason = "stop", token
            elif num_output >= request.max_new_tokens:
                reason = "length"
            if reason is not None:
                self._end(request, reason, stop_reason)
            updates.append(
                RequestUpdate(
                    request.request_id,
                    (token,),
                    reason,
                    stop_reason,
                    None,
                    num_prompt,
                    num_output,
                    request.num_cached_tokens,
                )
            )
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
        self._kv.pool.forget_all()
        return [self._end_without_token(request, "error", error) for request in living]

    def recompute_all(self, in_flight: Sequence[ScheduledBatch]) -> None:
        """Starts every running request anew, in order and ahead of those waiting, after the device lost its state.

        `in_flight` names the dispatched steps whose tokens will never arrive.
        """
        for batch in in_flight:
            for item in batch.items:
                if item.samples and item.request.status is not RequestStatus.FINISHED:
                    item.request.num_in_flight -= 1
        for request in tuple(self._roster.running):
            self._send_back(request)
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
            self._drop_kv(request)
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

    def resume_all(self) -> None:
        self._is_paused = False

    def snapshot(self, encode_params: Encode = unchanged) -> dict[str, Any]:
        """Gives all requests with their tokens as plain data, from which `restore` continues; `params` by the encoder.

        A policy that was passed in as an object is not part of it.
        """
        limits = asdict(self.config) if isinstance(self.config.policy, str) else None
        held = {name: group.leader.request_id for group in self._roster.siblings.groups() for name in group.held}
        requests = sorted(self._roster.living.values(), key=lambda request: request.order)
        return {
            "version": VERSION,
            "config": limits,
            "is_paused": self._is_paused,
            "num_arrived": self._roster.num_arrived,
            "requests": [to_plain(r, encode_params) | {"leader": held.get(r.request_id)} for r in requests],
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
            config = SchedulerConfig(**snapshot["config"])
        scheduler = cls(config, pool, groups)
        families: dict[str, list[Request]] = {}
        for plain in snapshot["requests"]:
            request = from_plain(plain, decode_params)
            limit = checked_max_new_tokens(request, config.max_model_len, scheduler._kv)
            if limit < request.max_new_tokens:
                raise AdmissionError(
                    f"request {request.request_id!r} may have {len(request.prompt_ids)} + {request.max_new_tokens} "
                    f"tokens, but max_model_len is {config.max_model_len} now: restore with a larger one"
                )
            request.block_tables = groups.empty_tables()
            families.setdefault(plain["leader"] or request.request_id, []).append(request)
        roster = scheduler._roster
        for family in families.values():
            roster.place(family)
        for plain in snapshot["requests"]:
            request = roster.living[plain["request_id"]]
            scheduler._deadlines.add(request, len(roster.living))
            if plain["is_paused"]:
                roster.pause(request)
        roster.num_arrived = snapshot["num_arrived"]
        scheduler._is_paused = snapshot["is_paused"]
        return scheduler

    def check(self) -> None:
        """Every row and block belongs to whom it was given, and every count fits the others."""
        self._roster.check()
        self._kv.check(self._roster.running)

    def _continue_running(self, draft: StepDraft) -> None:
        """Schedules the running requests, the best rank first.

        This loop is most of what a step costs the host, hence the numbers in locals where properties would read better.
        """
        block_size, chunk = self._kv.pool.block_size, self._kv.chunk
        items, left, prefill_left = draft.items, draft.num_left, draft.num_prefill_left
        for request in tuple(self._roster.running):
            row = request.row
            if row is None:  # preempted a moment ago, to make room for one ahead of it
                continue
            num_output = len(request.output_ids) + request.num_in_flight
            if num_output >= request.max_new_tokens:  # fully sampled: another step would be wasted on it
                continue
            start = request.num_computed
            count = pending = len(request.prompt_ids) + num_output - start
            if count > 1:
                count = min(count, left, chunk, prefill_left + 1)
            end = start + count
            if end > len(request.block_tables[0]) * block_size and not self._kv.grow(request, start, end):
                draft.ran_short = True
                if not self._make_room(request, end, draft.preempted):
                    continue
            items.append(Scheduled(request, row, start, count, count == pending))
            request.num_computed = end
            if count == pending:
                request.num_in_flight += 1
            if end >= request.cache_at:
                self._kv.remember(request)
            if request.num_to_recompute:
                self._count_recomputed(request, count, draft)
            prefill_left -= count - 1
            left -= count
            if not left:
                break
        draft.num_left, draft.num_prefill_left = left, prefill_left

    def _make_room(self, request: Request, end: int, preempted: list[Request]) -> bool:
        """Preempts until a running request can grow; False when it has to wait or was preempted itself.

        It waits when the last token of a request is already on its way: the blocks come back when that is read, and
        one step of patience costs less than a recompute. Requests scheduled in this step are never preempted, and the
        first of all neither, so that one at least always runs to its end.
        """
        running = self._roster.running
        index = running.index(request)
        while not self._kv.grow(request, request.num_computed, end):
            if any(other.is_fully_sampled for other in running):
                return False
            victim = running[self._roster.policy.victim(running, index or min(1, len(running) - 1))]
            self._send_back(victim)
            victim.num_yields += 1
            self._counters.num_preemptions += 1
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Admits waiting requests while rows, blocks and budget last; it preempts nobody and lets nobody overtake.

        A preempted request whose last token only the device knows cannot be computed again yet. The line stands still
        behind it; that ends with the next update, since its token is in a step already dispatched.
        """
        roster, kv = self._roster, self._kv
        while draft.num_left and roster.has_free_row and not draft.ran_short:
            request = roster.head(self._num_cached)
            if request is None or request.num_in_flight:
                break
            prefix = self._prefix(request)
            start = prefix.num_tokens
            pending = request.num_tokens - start
            count = min(pending, draft.num_left, kv.chunk, draft.num_prefill_left + 1)
            if not kv.admit(request, prefix, start + count, room_to_return(request, kv.pool.block_size)):
                break
            row = roster.start(request)
            draft.items.append(Scheduled(request, row, start, count, count == pending))
            draft.copies += kv.copies(request, prefix)
            self._count_found(request, prefix)
            request.num_computed = start + count
            request.num_in_flight += count == pending
            if request.num_computed >= request.cache_at:
                kv.remember(request)
            self._count_recomputed(request, count, draft)
            draft.num_prefill_left -= count - 1
            draft.num_left -= count

    def _prefix(self, request: Request) -> Prefix:
        """Finds what need not be computed of a request: from its sibling's blocks, else from the prefix cache."""
        source = self._roster.siblings.source(request)
        return (source and self._kv.fork(request, source)) or self._kv.find(request)

    def _num_cached(self, request: Request) -> int:
        return self._prefix(request).num_tokens

    def _count_found(self, request: Request, prefix: Prefix) -> None:
        """Counts what an admitted request found, by source; only its first admission counts as a hit."""
        found, counters = prefix.num_tokens, self._counters
        request.num_found = found
        request.num_to_recompute = max(request.num_to_recompute - found, 0)
        if request.num_preemptions:
            counters.num_refound_tokens += found
            return
        request.num_cached_tokens = found
        if prefix.is_fork:
            counters.num_forked_tokens += found
        elif self._kv.looks_up(request):
            counters.prefix_cache_queries += request.num_known
            counters.prefix_cache_hits += found

    def _count_recomputed(self, request: Request, count: int, draft: StepDraft) -> None:
        again = min(count, request.num_to_recompute)
        request.num_to_recompute -= again
        draft.num_recomputed += again

    def _send_back(self, request: Request) -> None:
        """Sends a running request back to wait, to be computed anew."""
        self._drop_kv(request)
        self._roster.send_back(request)

    def _drop_kv(self, request: Request) -> None:
        """Takes the blocks of a running request that is about to lose its row."""
        request.num_to_recompute += request.num_computed
        request.num_computed = 0
        request.num_preemptions += 1
        self._kv.release(request)

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
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=len(request.output_ids),
            num_cached_tokens=request.num_cached_tokens,
        )
