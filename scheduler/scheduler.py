"""Chooses the tokens of each step and follows what came of them. Knows integers: no device, no text, no sampling.

The engine may schedule step n+1 before it has read the tokens of step n. What makes that right is that the device runs
the steps in the order in which they were scheduled: a row or a block taken from a request may be given to another one
at once, since every step that still uses it for its first owner runs before those of the second.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

from jaxllm.scheduler.admission import AdmissionError, checked_max_new_tokens
from jaxllm.scheduler.batch import Scheduled, ScheduledBatch, SchedulerStats
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.policy import policy_named
from jaxllm.scheduler.request import FinishReason, Request, RequestStatus, RequestUpdate

__all__ = ["AdmissionError", "Scheduled", "ScheduledBatch", "Scheduler", "SchedulerConfig", "SchedulerStats"]


class Scheduler:
    """Requests on their way from waiting to running to finished, and the rows and blocks they hold meanwhile."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, groups: KVGroups) -> None:
        self.config = config
        self._pool = pool
        self._groups = groups
        self._policy = policy_named(config.policy)()  # holds the waiting requests
        self._running: list[Request] = []  # in order of admission
        self._living: dict[str, Request] = {}
        self._free_rows = list(range(config.max_num_seqs))  # a heap
        self._last_scheduled = 0
        self._last_updated = 0
        self._num_preemptions = 0
        self._num_scheduled_tokens = 0
        self._num_recomputed_tokens = 0
        self._num_discarded_tokens = 0

    @property
    def has_work(self) -> bool:
        """Says whether any request is waiting or running."""
        return bool(self._living)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._policy)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=self.num_running,
            waiting=self.num_waiting,
            kv_usage=self._pool.usage,
            num_preemptions=self._num_preemptions,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_discarded_tokens=self._num_discarded_tokens,
        )

    def add(self, request: Request) -> None:
        """Puts a new request behind those waiting and clips its max_new_tokens to the model's length.

        Raises:
            AdmissionError: the request could never run to its end, or its id belongs to a living one.
        """
        if request.request_id in self._living:
            raise AdmissionError(f"request id {request.request_id!r} belongs to a request that has not ended yet")
        limit = self.config.max_model_len
        request.max_new_tokens = checked_max_new_tokens(request, limit, self._pool, self._groups)
        request.block_tables = self._groups.empty_tables()
        self._living[request.request_id] = request
        self._policy.push(request)

    def schedule(self) -> ScheduledBatch | None:
        """Chooses the tokens of the next step and counts them as computed; None when nothing can run.

        None while `has_work` means that the tokens of a dispatched step have to be read first.
        """
        items: list[Scheduled] = []
        preempted: list[Request] = []
        budget = self._continue_running(items, preempted, self.config.max_num_batched_tokens)
        self._admit_waiting(items, budget)
        if not items:
            return None
        self._last_scheduled += 1
        return ScheduledBatch(tuple(items), tuple(preempted), self._last_scheduled)

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> list[RequestUpdate]:
        """Reads the tokens of a step, one per item; batches must come in the order in which they were scheduled."""
        if len(token_ids) != len(batch.items):
            raise ValueError(f"step {batch.step} has {len(batch.items)} items, got {len(token_ids)} token ids")
        if batch.step <= self._last_updated:
            raise ValueError(f"step {batch.step} came after step {self._last_updated} was read")
        self._last_updated = batch.step
        updates: list[RequestUpdate] = []
        finished, num_ended = RequestStatus.FINISHED, 0
        for item, token in zip(batch.items, token_ids, strict=True):
            if not item.samples:
                continue
            request = item.request
            if request.status is finished:  # stopped, aborted or failed after this step was dispatched
                self._num_discarded_tokens += 1
                continue
            request.num_in_flight -= 1
            output_ids = request.output_ids
            output_ids.append(token)
            num_prompt, num_output = len(request.prompt_ids), len(output_ids)
            reason, stop_reason = None, None
            if token in request.eos_token_ids:
                reason = "stop"
            elif token in request.stop_token_ids:
                reason, stop_reason = "stop", token
            elif num_output >= request.max_new_tokens:
                reason = "length"
            if reason is not None:
                self._end(request, reason, stop_reason)
                num_ended += 1
            updates.append(
                RequestUpdate(request.request_id, (token,), reason, stop_reason, None, num_prompt, num_output)
            )
        if num_ended:
            self._drop_ended()
        return updates

    def abort(self, request_id: str) -> RequestUpdate | None:
        """Ends a request wherever it stands; None when no living one has this id."""
        request = self._living.get(request_id)
        if request is None:
            return None
        update = self._end_without_token(request, "abort")
        self._drop_ended()
        return update

    def fail(self, batch: ScheduledBatch, error: str) -> list[RequestUpdate]:
        """Ends the requests of a step that raised, but for those which ended before."""
        living = [item.request for item in batch.items if item.request.status is not RequestStatus.FINISHED]
        updates = [self._end_without_token(request, "error", error) for request in living]
        self._drop_ended()
        return updates

    def recompute_all(self, in_flight: Sequence[ScheduledBatch]) -> None:
        """Starts every running request anew, in order and ahead of those waiting, after the device lost its state.

        `in_flight` names the dispatched steps whose tokens will never arrive.
        """
        for batch in in_flight:
            for item in batch.items:
                if item.samples and item.request.status is not RequestStatus.FINISHED:
                    item.request.num_in_flight -= 1
        for request in reversed(self._running):
            self._put_back(request)
        self._running.clear()

    def check(self) -> None:
        """Every row and block belongs to whom it was given, and every count fits the others."""
        self._pool.check()
        running, waiting = self._running, list(self._policy)
        for request in running:
            request.check_running(self._pool.block_size)
        for request in waiting:
            request.check_waiting()
        assert all(self._living.get(request.request_id) is request for request in running + waiting)
        assert len(self._living) == len(running) + len(waiting), "a living request is nowhere, or twice"
        held = Counter(block for request in running for table in request.block_tables for block in table)
        assert held == self._pool.references(), "the tables do not account for the blocks lent"
        rows = [request.row for request in running] + self._free_rows
        assert Counter(rows) == Counter(range(self.config.max_num_seqs)), "a row is lost or has two owners"

    def _continue_running(self, items: list[Scheduled], preempted: list[Request], budget: int) -> int:
        """Schedules the running requests, oldest first; gives the budget left for admission, 0 if blocks ran short.

        This loop is most of what a step costs the host, hence the numbers in locals where properties would read better.
        """
        block_size, left, any_short = self._pool.block_size, budget, False
        for request in tuple(self._running):
            row = request.row
            if row is None:  # preempted a moment ago, to make room for one ahead of it
                continue
            num_output = len(request.output_ids) + request.num_in_flight
            if num_output >= request.max_new_tokens:  # fully sampled: another step would be wasted on it
                continue
            start = request.num_computed
            pending = len(request.prompt_ids) + num_output - start
            count = pending if pending <= left else left
            end = start + count
            if end > len(request.block_tables[0]) * block_size and not self._grow(request, end):
                any_short = True
                if not self._make_room(request, end, preempted):
                    continue
            items.append(Scheduled(request, row, start, count, count == pending))
            request.num_computed = end
            if count == pending:
                request.num_in_flight += 1
            if request.num_to_recompute:
                self._count_recomputed(request, count)
            left -= count
            if not left:
                break
        self._num_scheduled_tokens += budget - left
        return 0 if any_short else left

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Preempts until a running request can grow; False when it has to wait or was preempted itself.

        It waits when the last token of a request is already on its way: the blocks come back when that is read, and
        one step of patience costs less than a recompute. Requests scheduled in this step are never preempted.
        """
        running = self._running
        index = running.index(request)
        while not self._grow(request, num_tokens):
            if any(other.is_fully_sampled for other in running):
                return False
            victim = running.pop(self._policy.victim(running, index))
            self._put_back(victim)
            victim.num_preemptions += 1
            self._num_preemptions += 1
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit_waiting(self, items: list[Scheduled], budget: int) -> None:
        """Admits waiting requests while rows, blocks and budget last; it preempts nobody and lets nobody overtake.

        A preempted request whose last token only the device knows cannot be computed again yet. The line stands still
        behind it; that ends with the next update, since its token is in a step already dispatched.
        """
        left = budget
        while left > 0 and self._free_rows:
            request = self._policy.head()
            if request is None or request.num_in_flight:
                break
            pending = request.num_pending
            count = min(pending, left)
            if not self._grow(request, request.num_computed + count):
                break
            self._policy.remove(request)
            row = request.row = heappop(self._free_rows)
            request.status = RequestStatus.RUNNING
            self._running.append(request)
            items.append(Scheduled(request, row, request.num_computed, count, count == pending))
            request.num_computed += count
            request.num_in_flight += count == pending
            self._count_recomputed(request, count)
            left -= count
        self._num_scheduled_tokens += budget - left

    def _count_recomputed(self, request: Request, count: int) -> None:
        again = min(count, request.num_to_recompute)
        request.num_to_recompute -= again
        self._num_recomputed_tokens += again

    def _grow(self, request: Request, num_tokens: int) -> bool:
        return self._groups.grow(request.block_tables, num_tokens, self._pool)

    def _put_back(self, request: Request) -> None:
        """Sends a running request back to wait, to be computed anew; the caller drops it from running."""
        request.num_to_recompute += request.num_computed
        request.num_computed = 0
        request.status = RequestStatus.WAITING
        self._take_back(request)
        self._policy.put_back(request)

    def _take_back(self, request: Request) -> None:
        """Takes the blocks and the row of a request."""
        self._groups.release(request.block_tables, self._pool)
        if request.row is not None:
            heappush(self._free_rows, request.row)
            request.row = None

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | None = None) -> None:
        """Ends a living request; the caller drops it from running with `_drop_ended`."""
        if request.status is RequestStatus.WAITING:
            self._policy.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._take_back(request)
        del self._living[request.request_id]

    def _end_without_token(self, request: Request, reason: FinishReason, error: str | None = None) -> RequestUpdate:
        self._end(request, reason)
        return RequestUpdate(
            request.request_id,
            finish_reason=reason,
            error=error,
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=len(request.output_ids),
        )

    def _drop_ended(self) -> None:
        self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
