"""The running requests that go on by one token in every step, as columns that steps share. Knows no blocks, no rows.

They stand first among a rank's running requests, up to the first one that does anything else. When one of them needs
more room, or has come to its last token, is known ahead, so that a step looks at those alone and counts the others on.
"""

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not

from jaxllm.scheduler.batch import NO_SINGLES, Singles
from jaxllm.scheduler.request import Request


class SteadyRequests:
    """A beginning of the running requests; `tick` counts the steps, so that one number tells where all of them are."""

    def __init__(self) -> None:
        self.tick = 0
        self._leading: list[Request] = []
        self._ended: set[Request] = set()  # of these, those whose last token is on its way
        # Of those that go on, in parallel: an offset and the tick together are num_computed before a step.
        self._requests: list[Request] = []
        self._rows: list[int] = []
        self._offsets: list[int] = []
        self._due: list[int] = []  # the tick from which on it cannot simply go on
        self._singles: Singles | None = NO_SINGLES  # the columns as steps get them, None where they have changed since

    @property
    def num_leading(self) -> int:
        """Counts the running requests that need not be looked at."""
        return len(self._leading)

    def begin(self, running: Sequence[Request], most: int) -> list[Request]:
        """Forgets who has left or has no more to compute, all if they are more than `most`; gives who needs room."""
        if running[: len(self._leading)] != self._leading:
            self._keep(running)
        if len(self._requests) > most:
            self._cut(0)
        due = list(compress(self._requests, map(self.tick.__ge__, self._due)))
        full = [request for request in due if not request.is_fully_sampled]
        if len(full) < len(due):
            for request in due:
                if request.is_fully_sampled:
                    self._drop(request)
        return full

    def advance(self, full: Sequence[Request], num_grown: int) -> tuple[Singles, int]:
        """Counts a token of each as computed and the next as sampled; gives them and the step's tick.

        Of those that needed room the first ones have it; from the next one on all go their own ways.
        """
        if num_grown < len(full):
            self._cut(self._leading.index(full[num_grown]))
        place = 0
        for request in full[:num_grown]:
            place = self._requests.index(request, place)
            self._due[place] = _last_start(request) - self._offsets[place]
        for request in self._requests:
            request.num_computed += 1
            request.num_tokens += 1
        if self._singles is None:
            self._singles = Singles(tuple(self._requests), tuple(self._rows), tuple(self._offsets))
        self.tick += 1
        return self._singles, self.tick - 1

    def join(self, request: Request) -> None:
        """Takes in the running request behind these, from whose only token this step samples."""
        assert request.row is not None
        offset = request.num_computed - self.tick
        self._leading.append(request)
        self._requests.append(request)
        self._rows.append(request.row)
        self._offsets.append(offset)
        self._due.append(_last_start(request) - offset)
        self._singles = None

    def join_ended(self, request: Request) -> None:
        """Takes in the running request behind these, whose last token is on its way."""
        self._leading.append(request)
        self._ended.add(request)

    def check(self, running: Sequence[Request]) -> None:
        """Those that still run have one token to compute, and are where the columns say."""
        there = {id(request) for request in running}
        for request, row, offset in zip(self._requests, self._rows, self._offsets, strict=True):
            if id(request) in there:
                assert (request.row, request.num_computed, request.num_pending) == (row, offset + self.tick, 1)

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
                if request in self._ended:
                    self._ended.remove(request)
                else:
                    self._forget(request)

    def _cut(self, place: int) -> None:
        """Keeps the first `place` of all."""
        dropped = set(self._leading[place:])
        del self._leading[place:]
        self._ended -= dropped
        num_kept = len(self._requests)
        while num_kept and self._requests[num_kept - 1] in dropped:
            num_kept -= 1
        for column in (self._requests, self._rows, self._offsets, self._due):
            del column[num_kept:]
        self._singles = None

    def _drop(self, request: Request) -> None:
        """Takes out one whose last token is on its way."""
        self._forget(request)
        self._ended.add(request)

    def _forget(self, request: Request) -> None:
        place = self._requests.index(request)
        for column in (self._requests, self._rows, self._offsets, self._due):
            del column[place]
        self._singles = None


def _last_start(request: Request) -> int:
    """Gives the num_computed at which a request needs more room, or has no more to compute."""
    return min(request.num_slots, request.max_tokens - 1)
