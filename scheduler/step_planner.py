"""Puts the tokens of one step together over all data ranks. Knows the line of waiting requests: no rows, no blocks."""

from collections.abc import Sequence

from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.data_rank import DataRank
from jaxllm.scheduler.placement import Placement
from jaxllm.scheduler.policy import CountCached
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.roster import Roster


class StepPlanner:
    """Lets every data rank go on with its running requests, then gives the waiting ones to those that have room."""

    def __init__(
        self, ranks: Sequence[DataRank], roster: Roster, placement: Placement, num_cached: CountCached
    ) -> None:
        self._ranks = ranks
        self._roster = roster
        self._placement = placement
        self._num_cached = num_cached

    def plan(self, step: int) -> ScheduledBatch | None:
        """Chooses the tokens of the next step and counts them as computed; None where there are none."""
        self._roster.release_siblings()
        for rank in self._ranks:
            rank.begin()
        self._admit_waiting()
        for rank in self._ranks:
            rank.end()
        drafts = [rank.draft for rank in self._ranks]
        if all(draft.is_empty for draft in drafts):
            return None
        return ScheduledBatch(
            tuple([draft.batch() for draft in drafts]),
            step,
            tuple([request for draft in drafts for request in draft.preempted]),
            sum([draft.num_recomputed for draft in drafts]),
        )

    def _admit_waiting(self) -> None:
        """Admits waiting requests while rows, blocks and budget last; it preempts nobody and lets nobody overtake.

        A request is placed when it starts, so the line stands only while no rank at all can start its head. A preempted
        request whose last token only the device knows cannot be computed again yet. The line stands still behind it;
        that ends with the next update, since its token is in a step already dispatched.
        """
        self._placement.begin()
        while ranks := [rank for rank in self._ranks if rank.is_open]:
            request = self._roster.head(self._num_cached)
            if request is None or request.num_in_flight or not self._start(request, ranks):
                break

    def _start(self, request: Request, ranks: Sequence[DataRank]) -> bool:
        for rank, prefix in self._placement.order(request, ranks):
            if rank.admit(request, prefix):
                self._placement.add(request, rank)
                return True
        return False
