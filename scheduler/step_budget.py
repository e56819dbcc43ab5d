"""How many tokens a step should have, and how many of prompts beside the single ones of requests. Chooses no requests.

Steps are padded to a few sizes. To put a few tokens of a prompt off costs less than padding: the next step computes
them all the same, and one request waits for its token a step longer.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.scheduler.kv_cache import KVCache
from jaxllm.scheduler.policy import CountCached
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.roster import Roster


class StepBudget:
    """Looks at what the next step could compute, and says how much of it should be."""

    def __init__(self, config: SchedulerConfig, kv: KVCache, roster: Roster, num_cached: CountCached) -> None:
        self._num_tokens = config.max_num_batched_tokens
        self._most = config.prefill_share
        self._sizes = config.step_sizes
        self._kv = kv
        self._roster = roster
        self._num_cached = num_cached

    def next(self, cut: Sequence[Request]) -> tuple[int, int]:
        """Gives the tokens that the next step may have, and how many of them beyond the first of each request.

        `cut` names the requests of the step before whose tokens did not all fit.
        """
        cut = [request for request in cut if request.row is not None] if self._sizes else []
        waiting = self._startable() if self._sizes else []
        if not cut and not waiting:
            return self._num_tokens, self._most
        num_requests = len(self._roster.running) + len(waiting)
        num_more = sum([min(request.num_pending, self._kv.chunk) - 1 for request in cut])
        num_more = min(num_more + sum(waiting) - len(waiting), self._most)
        if num_requests + num_more >= self._num_tokens:
            return self._num_tokens, self._most
        # One token above a size is the dearest: neither more requests nor more tokens than counted here come into it.
        size = min(filled(self._sizes, num_requests + num_more, num_requests), self._num_tokens)
        return size, min(size - num_requests, self._most)

    def _startable(self) -> list[int]:
        """Gives the numbers of tokens of the waiting requests for which rows, budget and free blocks will do."""
        roster, pool = self._roster, self._kv.pool
        startable: list[int] = []
        num_left, num_free = self._num_tokens, pool.num_free // len(self._kv.groups)
        for request in islice(roster.policy, roster.num_free_rows):
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
