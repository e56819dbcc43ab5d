"""Puts the tokens of one step together. Knows the budget, the roster and the KV cache: no tokens' meaning, no results.

One loop for the running requests and one for the waiting ones; what makes a feature different enters as a policy, as a
field of the batch or behind KVCache, never as a branch here.
"""

from jaxllm.scheduler.batch import Counters, Scheduled, StepDraft
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.kv_cache import KVCache, Prefix
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.policy import room_to_return
from jaxllm.scheduler.record import blank
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.roster import Roster
from jaxllm.scheduler.step_budget import StepBudget


class StepPlanner:
    """Chooses which requests compute how many tokens in a step, and who makes room for whom."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCache, roster: Roster, counters: Counters, pace: Pace | None
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._counters = counters
        self._budget = StepBudget(config, kv, roster, self._num_cached, pace)
        self._cut: list[Request] = []  # those whose tokens did not all fit into the last step

    def plan(self) -> StepDraft:
        """Chooses the tokens of the next step and counts them as computed: running requests first, then waiting."""
        self._roster.release_siblings()
        num_tokens, num_prefill_tokens = self._budget.next(self._cut)
        draft = StepDraft(num_tokens, num_prefill_tokens)
        self._cut = []
        self._continue_running(draft)
        self._admit_waiting(draft)
        self._counters.num_scheduled_tokens += num_tokens - draft.num_left
        self._counters.num_recomputed_tokens += draft.num_recomputed
        return draft

    def send_back(self, request: Request) -> None:
        """Sends a running request back to wait, to be computed anew."""
        self._kv.drop(request)
        self._roster.send_back(request)

    def _continue_running(self, draft: StepDraft) -> None:
        """Schedules the running requests, the best rank first.

        This loop is most of what a step costs the host, hence the numbers in locals where properties would read better.
        """
        chunk, items, left, prefill_left = self._kv.chunk, draft.items, draft.num_left, draft.num_prefill_left
        for request in tuple(self._roster.running):
            row = request.row
            if row is None:  # preempted a moment ago, to make room for one ahead of it
                continue
            num_tokens = request.num_tokens
            if num_tokens >= request.max_tokens:  # fully sampled: another step would be wasted on it
                continue
            start = request.num_computed
            count = pending = num_tokens - start
            if count > 1:
                count = min(count, left, chunk, prefill_left + 1)
            end = start + count
            if end > request.num_slots:
                if not self._kv.grow(request, start, end):
                    draft.ran_short = True
                    if not self._make_room(request, end, draft.preempted):
                        continue
                draft.grown.append(request)
            item = blank(Scheduled)
            item.request = request
            item.row = row
            item.start = start
            item.count = count
            item.samples = samples = count == pending
            items.append(item)
            request.num_computed = end
            if samples:
                request.num_tokens = num_tokens + 1
            else:
                self._cut.append(request)
            if count > 1:
                prefill_left -= count - 1
                self._kv.remember(request)
            if request.num_to_recompute:
                self._count_recomputed(request, count, draft)
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
            self.send_back(victim)
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
            draft.admitted.append(request)
            draft.items.append(Scheduled(request, row, start, count, count == pending))
            draft.copies += kv.copies(request, prefix)
            self._count_found(request, prefix)
            request.num_computed = start + count
            request.num_tokens += count == pending
            if count < pending:
                self._cut.append(request)
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
