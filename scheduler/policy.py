"""The order in which requests are admitted and preempted. Knows requests: no blocks, no rows, no token budget.

Two rules keep preemption from going round in circles.
- The scheduler serves the running requests in the order of their rank, takes victims only from behind the one that
  needs room, and never the first. So the best ranked one always advances, ends, and leaves its place to the next.
- Hysteresis: every time a request yields doubles the weight of what it would lose the next time (`weighted_loss`), and
  it comes back only when there is room for more than it had (`room_to_return`).
Admission preempts nobody, whatever the ranks: a request of a better priority is the next to start, not at once.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from jaxllm.scheduler.request import Request

type Rank = tuple[int, int]
type CountCached = Callable[[Request], int]


class Policy(Protocol):
    """Holds the waiting requests in the order of admission and names the running one to preempt."""

    def rank(self, request: Request) -> Rank:
        """Gives the place of a request among others, the least first; no two have the same, and it never changes."""
        ...

    def push(self, request: Request) -> None:
        """Takes a request in: a new one, or one that was running or paused."""
        ...

    def head(self, num_cached: CountCached) -> Request | None:
        """Gives the request to admit next, which stays until it is removed."""
        ...

    def remove(self, request: Request) -> None:
        """Takes out a waiting request, wherever it stands."""
        ...

    def victim(self, running: Sequence[Request], first: int) -> int:
        """Gives the index, `first` or above, of the running request to preempt."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Walks through the waiting requests in the order of their ranks."""
        ...


class FCFS:
    """First come, first served. One that comes back after a preemption or a pause has its old place."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []  # sorted by rank

    def rank(self, request: Request) -> Rank:
        return 0, request.order

    def push(self, request: Request) -> None:
        insort(self._waiting, request, key=self.rank)

    def head(self, num_cached: CountCached) -> Request | None:
        return self._waiting[0] if self._waiting else None

    def remove(self, request: Request) -> None:
        index = bisect_left(self._waiting, self.rank(request), key=self.rank)
        if index == len(self._waiting) or self._waiting[index] is not request:
            raise ValueError(f"request {request.request_id!r} is not waiting")
        del self._waiting[index]

    def victim(self, running: Sequence[Request], first: int) -> int:
        """Of the worst priority, the one that loses least; the newest of several."""
        worst = self.rank(running[-1])[0]
        behind = [index for index in range(first, len(running)) if self.rank(running[index])[0] == worst]
        return min(behind, key=lambda index: (weighted_loss(running[index]), -index))

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)


class Priority(FCFS):
    """The lowest priority number first, and those of one priority in order of arrival."""

    def rank(self, request: Request) -> Rank:
        return request.priority, request.order


class LongestFirst(FCFS):
    """The one that may generate most first, and those of one limit in order of arrival.

    For a batch whose lengths are known beforehand: what is long does not run on alone when all else has ended. Where
    requests keep coming, the short ones may wait for ever.
    """

    def rank(self, request: Request) -> Rank:
        return -request.max_new_tokens, request.order


class CacheAware:
    """Another policy, but of its first requests of equal priority the one with the longest cached prefix goes first.

    It looks at `among` requests, and nobody is overtaken more than `patience` times by this: after that it is next.
    """

    def __init__(self, ordered: Policy, among: int = 8, patience: int = 16) -> None:
        self._ordered = ordered
        self._among = among
        self._patience = patience
        self._overtaken: dict[str, int] = {}

    def rank(self, request: Request) -> Rank:
        return self._ordered.rank(request)

    def push(self, request: Request) -> None:
        self._ordered.push(request)

    def head(self, num_cached: CountCached) -> Request | None:
        first = self._ordered.head(num_cached)
        if first is None or self._overtaken.get(first.request_id, 0) >= self._patience:
            return first
        rivals = [r for r in islice(self._ordered, self._among) if self.rank(r)[0] == self.rank(first)[0]]
        return max(rivals, key=num_cached)  # the first of equals

    def remove(self, request: Request) -> None:
        self._ordered.remove(request)
        self._overtaken.pop(request.request_id, None)
        for other in islice(self._ordered, self._among):
            if self.rank(other) > self.rank(request):
                break
            self._overtaken[other.request_id] = self._overtaken.get(other.request_id, 0) + 1

    def victim(self, running: Sequence[Request], first: int) -> int:
        return self._ordered.victim(running, first)

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._ordered)


def weighted_loss(request: Request) -> int:
    """Gives what preempting a request would cost, in tokens, doubled for every time it has yielded before.

    What it found in the cache it is likely to find again, so only what it has computed itself counts as lost: some of
    its full blocks may survive too, but they are taken from it because blocks are short.
    """
    return (request.num_computed - request.num_found) << request.num_yields


def room_to_return(request: Request, block_size: int) -> int:
    """Gives the tokens that must have room before a request that has yielded runs again; 0 for one that never has."""
    if not request.num_yields:
        return 0
    most = request.num_prompt + request.max_new_tokens
    return min(request.num_tokens + (block_size << request.num_yields), most)


POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FCFS,
    "priority": Priority,
    "longest-first": LongestFirst,
    "cache-aware": lambda: CacheAware(FCFS()),
    "cache-aware-priority": lambda: CacheAware(Priority()),
}


def policy_named(name: str) -> Callable[[], Policy]:
    """Gives what makes a policy.

    Raises:
        ValueError: no policy has this name.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown scheduling policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
