"""The running requests that go on by one token in every step, as columns that steps share. Knows no blocks.

They stand first among a rank's running requests, up to the first one that does anything else. When one of them needs
more room, or has come to its last token, is known ahead, so that a step looks at those alone and counts the others on.
"""

from collections.abc import Callable, Sequence
from itertools import compress, count
from operator import is_not

from jaxllm.scheduler.batch import NO_SINGLES, Singles
from jaxllm.scheduler.policy import Rank
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.roster import Rows


class SteadyRequests:
    """A beginning of the running requests; `tick` counts the steps, so that one number tells where all of them are."""

    def __init__(self, rows: Rows, rank: Callable[[Request], Rank]) -> None:
        self.tick = 0
        self._rows_of_all = rows
        self._rank = rank
        self._num_changes_seen = 0
        self._leading: list[Request] = []  # also those whose last token is on its way, which no longer go on
        self._members: set[Request] = set()  # those that go on
        # Of these, in parallel: an offset and the tick together are num_computed before a step.
        self._requests: list[Request] = []
        self._rows: list[int] = []
        self._offsets: list[int] = []
        self._last_ticks: list[int] = []
        self._end_token_ids: frozenset[int] = frozenset()
        self._num_quiet = 0
        self._due: dict[int, list[Request]] = {}  # by the tick from which on they cannot simply go on; some have left
        self._singles: Singles | None = NO_SINGLES  # the columns as steps get them, None where they have changed since

    @property
    def num_leading(self) -> int:
        """Counts the running requests that need not be looked at."""
        return len(self._leading)

    def begin(self, most: int) -> list[Request]:
        """Forgets who has left or has no more to compute, all if they are more than `most`; gives who needs room."""
        if self._rows_of_all.num_changes != self._num_changes_seen:
            self._num_changes_seen = self._rows_of_all.num_changes
            self._keep(self._rows_of_all.running)
        if len(self._requests) > most:
            self._cut(0)
        full = []
        for request in dict.fromkeys(self._due.pop(self.tick, ())):
            if request not in self._members or request.num_computed < _last_start(request):
                continue
            if request.is_fully_sampled:
                self._forget(request)
            else:
                full.append(request)
        full.sort(key=self._rank)
        return full

    def advance(self, full: Sequence[Request], num_grown: int) -> tuple[Singles, int]:
        """Counts a token of each as computed and the next as sampled; gives them and the step's tick.

        Of those that needed room the first ones have it; from the next one on all go their own ways.
        """
        if num_grown < len(full):
            self._cut(self._leading.index(full[num_grown]))
        for request in full[:num_grown]:
            self._expect(request)
        for request in self._requests:
            request.num_computed += 1
            request.num_tokens += 1
        if self._singles is None:
            self._singles = Singles(
                tuple(self._requests),
                tuple(self._rows),
                tuple(self._offsets),
                tuple(self._last_ticks),
                self._end_token_ids,
                self._num_quiet,
            )
        self.tick += 1
        return self._singles, self.tick - 1

    def join(self, request: Request) -> None:
        """Takes in the running request behind these, from whose only token this step samples."""
        assert request.row is not None
        offset = request.num_computed - self.tick
        if not self._members:  # else those of all that ever were would gather
            self._end_token_ids = frozenset()
        self._leading.append(request)
        self._members.add(request)
        self._requests.append(request)
        self._rows.append(request.row)
        self._offsets.append(offset)
        self._last_ticks.append(request.max_tokens - 2 - offset)
        self._end_token_ids |= request.end_token_ids
        self._num_quiet += request.is_quiet
        self._expect(request)
        self._singles = None

    def join_ended(self, request: Request) -> None:
        """Takes in the running request behind these, whose last token is on its way."""
        self._leading.append(request)

    def check(self, running: Sequence[Request]) -> None:
        """Those that still run have one token to compute, and are where the columns say."""
        there = {id(request) for request in running}
        for request, row, offset in zip(self._requests, self._rows, self._offsets, strict=True):
            if id(request) in there:
                assert (request.row, request.num_computed, request.num_pending) == (row, offset + self.tick, 1)

    def _expect(self, request: Request) -> None:
        """Notes down when one of them cannot simply go on."""
        self._due.setdefault(self.tick + _last_start(request) - request.num_computed, []).append(request)

    def _keep(self, running: Sequence[Request]) -> None:
        """Keeps those that are a beginning of the running requests; both are in the order of their ranks."""
        leading = self._leading
        while running[: len(leading)] != leading:
            place = next(compress(count(), map(is_not, leading, running)), len(running))
            request = leading[place]
            if place < len(running) and request.data_rank == running[place].data_rank:  # another came before it
                self._cut(place)
            else:
                del leading[place]
                if request in self._members:
                    self._forget(request)

    def _cut(self, place: int) -> None:
        """Keeps the first `place` of all."""
        dropped = self._members.intersection(self._leading[place:])
        del self._leading[place:]
        self._members -= dropped
        num_kept = len(self._members)
        for column in (self._requests, self._rows, self._offsets, self._last_ticks):
            del column[num_kept:]
        self._num_quiet -= sum([request.is_quiet for request in dropped])
        self._singles = None

    def _forget(self, request: Request) -> None:
        """Takes out one that does not go on."""
        place = self._requests.index(request)
        self._members.remove(request)
        for column in (self._requests, self._rows, self._offsets, self._last_ticks):
            del column[place]
        self._num_quiet -= request.is_quiet
        self._singles = None


def _last_start(request: Request) -> int:
    """Gives the num_computed at which a request needs more room, or has no more to compute."""
    return min(request.num_slots, request.max_tokens - 1)
