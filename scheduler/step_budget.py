"""How many tokens a rank's step should have, how many of prompts beside single ones of requests. Chooses no requests.

Two things cap it besides the configured limits. Running requests may want their next token by a time: see pace.py. And
steps are padded to a few sizes. To put a few tokens of a prompt off costs less than padding: the next step computes
them all the same, and one request waits for its token a step longer.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.kv_cache import KVCache
from jaxllm.scheduler.pace import Pace
from jaxllm.scheduler.policy import CountCached
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.roster import Roster, Rows


class StepBudget:
    """Looks at what the next step could compute, and says how much of it should be."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        rows: Rows,
        roster: Roster,
        num_cached: CountCached,
        pace: Pace | None = None,
    ) -> None:
        self._num_tokens = config.max_num_batched_tokens
        self._most = config.prefill_share
        self._sizes = config.step_sizes
        self._kv = kv
        self._rows = rows
        self._roster = roster
        self._num_cached = num_cached
        self._pace = pace

    def next(self, cut: Sequence[Request]) -> tuple[int, int]:
        """Gives the tokens that the next step may have, and how many of them beyond the first of each request.

        `cut` names the requests of the step before whose tokens did not all fit.
        """
        running = self._rows.running
        if not self._sizes and self._pace is None:
            return self._num_tokens, self._most
        cut = [request for request in cut if request.data_rank == self._rows.data_rank]
        waiting = self._startable()
        if not (cut or waiting) or len(running) >= self._num_tokens:
            return self._num_tokens, self._most
        limit = self._num_tokens
        if self._pace is not None and len(running) > len(cut):
            num_context = sum([request.num_computed for request in running])
            limit = min(limit, self._pace.most_tokens(len(running), len(running) + bool(waiting), num_context))
            if limit <= len(running):  # prompts that have begun go on by a token a step, no other begins
                return len(running), 0
        num_requests = len(running) + len(waiting)
        num_more = sum([min(request.num_pending, self._kv.chunk) - 1 for request in cut])
        num_wanted = num_requests + min(num_more + sum(waiting) - len(waiting), self._most)
        if num_wanted < limit:
            limit = min(filled(self._sizes, num_wanted, num_requests), limit)
        # One token above a size is the dearest, so this many come into the step and no more. All who run have a place.
        return limit, min(limit - len(running), self._most)

    def _startable(self) -> list[int]:
        """Gives the numbers of tokens of the waiting requests for which rows, budget and free blocks will do.

        Of several data ranks each counts on its share of the line: on the first one if there are few.
        """
        roster, pool = self._roster, self._kv.pool
        share = -(-len(roster.policy) // len(roster.rows))
        startable: list[int] = []
        num_left, num_free = self._num_tokens, pool.num_free // len(self._kv.groups)
        for request in islice(roster.policy, min(self._rows.num_free, share)):
            count = min(request.num_tokens - self._num_cached(request), self._kv.chunk)
            num_free -= -(-count // pool.block_size)
            if num_left <= 0 or num_free < 0 or request.num_in_flight:
                break
            num_left -= count
            startable.append(count)
        return startable


def filled(sizes: Sequence[int], num_wanted: int, num_requests: int) -> int:
    """Gives the size that a step of `num_wanted` tokens of `num_requests` requests should fill: the next, or one below.

    One below must be worth the wait of a request, which costs the step's time divided by all who run; and it has at
    least half of the tokens beyond the first of each request, so that prompts come to their end.
    """
    index = bisect_left(sizes, num_wanted)
    if index == len(sizes):
        return num_wanted
    above = sizes[index]
    if not index or (above - num_wanted) * num_requests <= num_wanted:
        return above
    below = sizes[index - 1]
    return below if 2 * (num_wanted - below) <= num_wanted - num_requests else above
