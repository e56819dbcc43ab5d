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
from jaxllm.scheduler.batch import RankBatch, Scheduled, ScheduledBatch, SchedulerStats
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.data_rank import DataRank
from jaxllm.scheduler.deadlines import Deadlines
from jaxllm.scheduler.kv_cache import KVCache
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.placement import Placement
from jaxllm.scheduler.record import blank
from jaxllm.scheduler.request import FinishReason, Request, RequestStatus, RequestUpdate, WeightVersion
from jaxllm.scheduler.roster import Roster
from jaxllm.scheduler.snapshot import VERSION, Encode, place_requests, plain_requests, unchanged
from jaxllm.scheduler.step_planner import StepPlanner
from jaxllm.scheduler.updates import SinglesTokens, StepUpdates

__all__ = ["AdmissionError", "Scheduled", "ScheduledBatch", "Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Requests on their way from waiting to running to finished, and the rows and blocks they hold meanwhile.

    They wait in one line, and start on the data rank that suits them best: each has rows and a pool of its own.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pools: BlockPool | Sequence[BlockPool],
        groups: KVGroups,
        pace: Pace | None = None,
    ) -> None:
        """`pools` has one for each data rank, all of one size; a single one need not be in a list."""
        pools = (pools,) if isinstance(pools, BlockPool) else tuple(pools)
        if len({(pool.num_blocks, pool.block_size) for pool in pools}) != 1:
            raise ValueError(f"the pools must be of one size, got {[pool.num_blocks for pool in pools]} blocks")
        self.config = config
        self._roster = Roster(config.make_policy(), config.max_num_seqs, len(pools))
        chunk, caching = config.largest_chunk, config.enable_prefix_caching
        self._ranks = tuple(
            DataRank(config, KVCache(pool, groups, chunk, caching), rows, self._roster, pace)
            for pool, rows in zip(pools, self._roster.rows, strict=True)
        )
        self._kv = self._ranks[0].kv  # for what is the same on all ranks
        placement = Placement(self._ranks, config.rank_imbalance_tokens)
        self._planner = StepPlanner(self._ranks, self._roster, placement, self._num_cached)
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
        return self._roster.num_running

    @property
    def rank_running(self) -> tuple[int, ...]:
        """Counts the running requests of each data rank."""
        return tuple([len(rank.rows.running) for rank in self._ranks])

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    @property
    def stats(self) -> SchedulerStats:
        """Reads the gauges and counters of all data ranks together."""
        counted = [rank.counters.all() for rank in self._ranks]
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            paused=self._roster.num_paused,
            kv_usage=sum([rank.kv.pool.usage for rank in self._ranks]) / len(self._ranks),  # pools are of one size
            **{name: sum([counters[name] for counters in counted]) for name in counted[0]},
        )

    @property
    def rank_stats(self) -> list[SchedulerStats]:
        """Reads those of each data rank, which nobody waits for: the line is one."""
        return [rank.stats() for rank in self._ranks]

    @property
    def pool_size(self) -> tuple[int, int]:
        """Gives the blocks of a data rank's pool, and the tokens that one holds."""
        return self._kv.pool.num_blocks, self._kv.pool.block_size

    @property
    def kv_utilisation(self) -> float:
        """Gives the share of the lent slots that hold a token; the rest is the internal waste of blocks."""
        lent = [rank.kv.pool.num_lent for rank in self._ranks]
        shares = [rank.kv.utilisation(rank.rows.running) for rank in self._ranks]
        total = sum(lent)
        return sum([n * share for n, share in zip(lent, shares, strict=True)]) / total if total else 1.0

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

    def take_over(self, request: Request) -> None:
        """Puts a request that another scheduler began behind those waiting; it goes on behind its output tokens.

        Raises:
            AdmissionError: it could never run to its end, has reached it, or its id belongs to a living one.
        """
        if request.request_id in self._roster.living:
            raise AdmissionError(f"request id {request.request_id!r} belongs to a request that has not ended yet")
        request.limit(checked_max_new_tokens(request, self.config.max_model_len, self._kv))
        if request.is_fully_sampled:
            raise AdmissionError(
                f"request {request.request_id!r} has {len(request.output_ids)} output tokens, as many as it may have"
            )
        request.num_preemptions += 1  # what it finds in the cache is not told as found by a new prompt
        request.block_tables = self._kv.groups.empty_tables()
        self._kv.prepare(request)
        self._roster.enter((request,))
        self._deadlines.add(request, len(self._roster.living))

    def schedule(self) -> ScheduledBatch | None:
        """Chooses the tokens of the next step and counts them as computed; None when nothing can run.

        None while `has_work` means that the tokens of a dispatched step have to be read first.
        """
        if self._is_paused:
            return None
        batch = self._planner.plan(self._last_scheduled + 1)
        self._last_scheduled += batch is not None
        return batch

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> StepUpdates:
        """Reads the tokens of a step, one per item; batches must come in the order in which they were scheduled."""
        num_items = batch.num_requests
        if len(token_ids) != num_items:
            raise ValueError(f"step {batch.step} has {num_items} items, got {len(token_ids)} token ids")
        if batch.step <= self._last_updated:
            raise ValueError(f"step {batch.step} came after step {self._last_updated} was read")
        self._last_updated = batch.step
        parts: list[SinglesTokens | list[RequestUpdate]] = []
        num_quiet = 0
        for rank, part in zip(self._ranks, batch.ranks, strict=True):
            own, token_ids = (token_ids, ()) if len(batch.ranks) == 1 else _split(token_ids, part.num_requests)
            if part.singles.requests:
                tokens, num_discarded = self._update_singles(rank, part, own)
                parts.append(tokens)
                num_quiet += part.singles.num_quiet - num_discarded
            if part.others:
                parts.append(self._update_others(rank, part, own[len(part.singles.rows) :]))
        return StepUpdates(parts, num_quiet)

    def _update_singles(self, rank: DataRank, part: RankBatch, token_ids: Sequence[int]) -> tuple[SinglesTokens, int]:
        """Adds the tokens of those that just go on, and looks at those which may end; counts quiet ones discarded.

        Whoever can end is known ahead or by the token, so the loop touches little of each request.
        """
        singles, tick, finished = part.singles, part.tick, RequestStatus.FINISHED
        end_token_ids, instead, num_discarded = singles.end_token_ids, {}, 0
        for request, token, last_tick in zip(singles.requests, token_ids, singles.last_ticks, strict=False):
            if request.status is finished:  # stopped, aborted or failed after this step was dispatched
                rank.counters.num_discarded_tokens += 1
                instead[request] = None
                num_discarded += request.is_quiet
                continue
            request.output_ids.append(token)
            if tick >= last_tick or token in end_token_ids:
                update = self._updated(request, token, 0)
                if update.finish_reason is not None or request.is_quiet:
                    instead[request] = update
        return SinglesTokens(singles, tick, token_ids, instead, self.weight_version), num_discarded

    def _update_others(self, rank: DataRank, part: RankBatch, token_ids: Sequence[int]) -> list[RequestUpdate]:
        updates = []
        for item, token in zip(part.others, token_ids, strict=True):
            if not item.samples:
                continue
            if item.request.status is RequestStatus.FINISHED:
                rank.counters.num_discarded_tokens += 1
                continue
            item.request.output_ids.append(token)
            updates.append(self._updated(item.request, token, 1))
        return updates

    def _updated(self, request: Request, token: int, num_uncounted: int) -> RequestUpdate:
        """Ends a request if its newest token says so, and tells what it has got."""
        num_output = len(request.output_ids)
        reason, stop_reason = None, None
        if token in request.end_token_ids:
            reason, stop_reason = "stop", None if token in request.eos_token_ids else token
        elif num_output >= request.max_new_tokens:
            reason = "length"
        if reason is not None:
            self._end(request, reason, stop_reason)
        new = request.take_untold()
        update = blank(RequestUpdate)
        update.request_id = request.request_id
        update.token_ids = new or (token,)
        update.finish_reason = reason
        update.stop_reason = stop_reason
        update.error = None
        update.num_prompt_tokens = request.num_prompt
        update.num_output_tokens = num_output
        update.num_cached_tokens = request.num_cached_tokens
        update.first_scheduled_time = request.first_scheduled_time
        update.scores = None
        update.weight_version = self.weight_version
        update.num_counted = max(len(new) - num_uncounted, 0)
        return update

    def tell_untold(self) -> list[RequestUpdate]:
        """Tells the tokens of quiet requests that have not been told; what they get from here on is of another kind."""
        return [self._told(request) for request in self._roster.living.values() if _has_untold(request)]

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
        self._forget_prefixes()
        return updates

    def recompute_all(self, in_flight: Sequence[ScheduledBatch]) -> None:
        """Starts every running request anew, in order and ahead of those waiting, after the device lost its state.

        `in_flight` names the dispatched steps whose tokens will never arrive.
        """
        for batch in in_flight:
            for item in batch.items:
                if item.samples and item.request.status is not RequestStatus.FINISHED:
                    item.request.num_tokens -= 1
        for rank in self._ranks:
            for request in tuple(rank.rows.running):
                rank.send_back(request)
        self._forget_prefixes()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False, and nothing happens, while requests hold blocks."""
        if any(rank.kv.pool.num_lent for rank in self._ranks):
            return False
        self._forget_prefixes()
        return True

    def pause(self, request_id: str) -> bool:
        """Takes a request aside until it is resumed: it keeps its tokens, those on their way included, and no KV."""
        request = self._roster.living.get(request_id)
        if request is None or request.status is RequestStatus.PAUSED:
            return False
        if request.data_rank is not None:
            self._ranks[request.data_rank].kv.drop(request)
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
        begun ("drop"). No prefix of older weights is found any more, nor remembered later. Gives what ended, and
        of quiet requests what older weights have brought them.
        """
        ended: list[RequestUpdate] = []
        if kv == "drop":
            begun = [r for r in self._roster.living.values() if r.status is RequestStatus.RUNNING or r.output_ids]
            ended = [self._end_without_token(request, "abort") for request in begun]
        ended += self.tell_untold()
        for rank in self._ranks:
            for request in tuple(rank.rows.running) if kv == "recompute" else ():
                rank.send_back(request)
            rank.kv.begin_generation()
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
        pools: BlockPool | Sequence[BlockPool],
        groups: KVGroups,
        config: SchedulerConfig | None = None,
        decode_params: Encode = unchanged,
    ) -> "Scheduler":
        """Makes a scheduler that continues from a snapshot, all requests waiting; `config` overrides the snapshot's.

        It may have another number of data ranks.

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
        scheduler = cls(config, pools, groups)
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
        for rank in self._ranks:
            rank.check()

    def _check_restored(self, request: Request) -> None:
        if checked_max_new_tokens(request, self.config.max_model_len, self._kv) < request.max_new_tokens:
            raise AdmissionError(
                f"request {request.request_id!r} may have {request.num_prompt} + {request.max_new_tokens} tokens, "
                f"but max_model_len is {self.config.max_model_len} now: restore with a larger one"
            )

    def _num_cached(self, request: Request) -> int:
        """Counts the tokens of a request that are cached on the rank that has most of them."""
        return max([rank.num_cached(request) for rank in self._ranks])

    def _forget_prefixes(self) -> None:
        for rank in self._ranks:
            rank.kv.pool.forget_all()

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | None = None) -> None:
        if request.data_rank is not None:
            self._ranks[request.data_rank].kv.release(request)
        self._roster.end(request)
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def _end_without_token(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestUpdate:
        self._end(request, reason)
        return self._told(request, reason, error)

    def _told(self, request: Request, reason: FinishReason | None = None, error: str | None = None) -> RequestUpdate:
        untold = request.take_untold()
        return RequestUpdate(
            request.request_id,
            untold,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=request.num_prompt,
            num_output_tokens=len(request.output_ids),
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            weight_version=self.weight_version,
            num_counted=len(untold),
        )


def _has_untold(request: Request) -> bool:
    return request.is_quiet and request.num_told < len(request.output_ids)


def _split(token_ids: Sequence[int], count: int) -> tuple[Sequence[int], Sequence[int]]:
    return token_ids[:count], token_ids[count:]
