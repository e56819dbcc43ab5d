"""One data rank: its rows, its blocks and its part of each step. Knows no other rank and no results.

One loop for the running requests that do not simply go on by one token (steady.py has those), and one call for each
that joins them; what makes a feature different enters as a policy, as a field of the batch or behind KVCache, never as
a branch here.
"""

from jaxllm.scheduler.batch import Counters, Scheduled, SchedulerStats, StepDraft
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.kv_cache import KVCache, Prefix
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.policy import room_to_return
from jaxllm.scheduler.record import blank
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.roster import Roster, Rows
from jaxllm.scheduler.steady import SteadyRequests
from jaxllm.scheduler.step_budget import StepBudget


class DataRank:
    """Chooses which of its requests compute how many tokens in a step, and who makes room for whom."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        rows: Rows,
        roster: Roster,
        pace: Pace | None,
    ) -> None:
        self.index = rows.data_rank
        self.kv = kv
        self.rows = rows
        self.counters = Counters()
        self.draft = StepDraft(0, 0)  # of the step that is being put together
        self._roster = roster
        self._budget = StepBudget(config, kv, rows, roster, self.num_cached, pace)
        self._steady = SteadyRequests(rows, roster.policy.rank)
        self._cut: list[Request] = []  # those whose tokens did not all fit into the last step

    @property
    def is_open(self) -> bool:
        """Says whether a waiting request may still join the step here, as far as rows and budget go."""
        draft = self.draft
        return draft.num_left > 0 and self.rows.num_free > 0 and not draft.ran_short

    @property
    def num_tokens_in_flight(self) -> int:
        """Counts the tokens of the running requests, which is what the rank's steps read and hold."""
        return sum([request.num_tokens for request in self.rows.running])

    @property
    def num_blocks_left(self) -> int:
        """Counts the free blocks beyond those that the prompts under way will take."""
        pool, tables = self.kv.pool, len(self.kv.groups)
        unfinished = [request for request in self._cut if request.data_rank == self.index]
        num_missing = sum([max(request.num_tokens - request.num_slots, 0) for request in unfinished])
        return pool.num_free - num_missing // pool.block_size * tables

    def stats(self) -> SchedulerStats:
        """Reads the rank's gauges and counters."""
        return SchedulerStats(
            running=len(self.rows.running),
            waiting=0,
            paused=0,
            kv_usage=self.kv.pool.usage,
            **self.counters.all(),
        )

    def begin(self) -> None:
        """Begins a step with the running requests, and counts their tokens as computed."""
        num_tokens, num_prefill_tokens = self._budget.next(self._cut)
        self.draft = draft = StepDraft(num_tokens, num_prefill_tokens)
        self._cut = []
        self._continue_steady(draft)
        if draft.num_left:
            self._continue_others(draft)

    def prefix(self, request: Request) -> Prefix:
        """Finds what need not be computed of a request: from its sibling's blocks, else from the prefix cache."""
        source = self._roster.siblings.source(request, self.index)
        return (source and self.kv.fork(request, source)) or self.kv.find(request)

    def num_cached(self, request: Request) -> int:
        return self.prefix(request).num_tokens

    def admit(self, request: Request, prefix: Prefix) -> bool:
        """Starts the head of the line; False, and nothing happens, when the free blocks do not do for it."""
        kv, draft = self.kv, self.draft
        start = prefix.num_tokens
        pending = request.num_tokens - start
        count = min(pending, draft.num_left, kv.chunk, draft.num_prefill_left + 1)
        if not kv.admit(request, prefix, start + count, room_to_return(request, kv.pool.block_size)):
            return False
        row = self._roster.start(request, self.rows)
        draft.admitted.append(request)
        draft.others.append(Scheduled(request, row, start, count, count == pending))
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
        return True

    def end(self) -> None:
        """Counts what the step computes."""
        self.counters.num_scheduled_tokens += self.draft.num_budgeted - self.draft.num_left
        self.counters.num_recomputed_tokens += self.draft.num_recomputed

    def send_back(self, request: Request) -> None:
        """Sends a running request back to wait, to be computed anew."""
        self.kv.drop(request)
        self._roster.send_back(request)

    def check(self) -> None:
        """Every block is accounted for, and every number where it should be."""
        self.kv.check(self.rows.running)
        self._steady.check(self.rows.running)

    def _continue_steady(self, draft: StepDraft) -> None:
        """Schedules the first of the running requests, as far as they go on by one token."""
        full = self._steady.begin(draft.num_left)
        num_grown = self.kv.grow_singles(full) if full else 0
        draft.grown += full[:num_grown]
        draft.singles, draft.tick = self._steady.advance(full, num_grown)
        draft.num_left -= len(draft.singles.rows)

    def _continue_others(self, draft: StepDraft) -> None:
        """Schedules the other running requests, the best rank first; those that go on by one token become steady.

        This loop is much of what a step costs the host, hence the numbers in locals where properties would read better.
        """
        chunk, items, left, prefill_left = self.kv.chunk, draft.others, draft.num_left, draft.num_prefill_left
        steady, is_next = self._steady, True  # is_next: all before it are steady
        for request in self.rows.running[steady.num_leading :]:
            row = request.row
            if row is None:  # preempted a moment ago, to make room for one ahead of it
                continue
            num_tokens = request.num_tokens
            if num_tokens >= request.max_tokens:  # fully sampled: another step would be wasted on it
                if is_next:
                    steady.join_ended(request)
                continue
            start = request.num_computed
            count = pending = num_tokens - start
            if count > 1:
                count = min(count, left, chunk, prefill_left + 1)
            end = start + count
            if end > request.num_slots:
                if not self.kv.grow(request, start, end):
                    draft.ran_short = True
                    if not self._make_room(request, end, draft.preempted):
                        is_next = False
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
                self.kv.remember(request)
            if request.num_to_recompute:
                self._count_recomputed(request, count, draft)
            is_next = is_next and samples and count == 1 and not request.num_to_recompute
            if is_next:
                steady.join(request)
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
        running = self.rows.running
        index = running.index(request)
        while not self.kv.grow(request, request.num_computed, end):
            if any(other.is_fully_sampled for other in running):
                return False
            victim = running[self._roster.policy.victim(running, index or min(1, len(running) - 1))]
            self.send_back(victim)
            victim.num_yields += 1
            self.counters.num_preemptions += 1
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _count_found(self, request: Request, prefix: Prefix) -> None:
        """Counts what an admitted request found, by source; only its first admission counts as a hit."""
        found, counters = prefix.num_tokens, self.counters
        request.num_found = found
        request.num_to_recompute = max(request.num_to_recompute - found, 0)
        if request.num_preemptions:
            counters.num_refound_tokens += found
            return
        request.num_cached_tokens = found
        if prefix.is_fork:
            counters.num_forked_tokens += found
        elif self.kv.looks_up(request):
            counters.prefix_cache_queries += request.num_known
            counters.prefix_cache_hits += found

    def _count_recomputed(self, request: Request, count: int, draft: StepDraft) -> None:
        again = min(count, request.num_to_recompute)
        request.num_to_recompute -= again
        draft.num_recomputed += again
