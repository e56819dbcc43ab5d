"""The order in which requests are admitted and preempted. Knows requests: no blocks, no rows, no token budget."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from jaxllm.scheduler.request import Request


class Policy(Protocol):
    """Holds the waiting requests in the order of admission and names the running one to preempt."""

    def push(self, request: Request) -> None:
        """Takes a new request in."""
        ...

    def put_back(self, request: Request) -> None:
        """Takes a request in that was running, ahead of those which never were."""
        ...

    def head(self) -> Request | None:
        """Gives the request to admit next, which stays until it is removed."""
        ...

    def remove(self, request: Request) -> None:
        """Takes out a waiting request, wherever it stands."""
        ...

    def victim(self, running: Sequence[Request], first: int) -> int:
        """Gives the index, `first` or above, of the running request to preempt."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFS:
    """First come, first served: admits in order of arrival and preempts the newest admitted."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def head(self) -> Request | None:
        return next(iter(self._waiting.values()), None)

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]

    def victim(self, running: Sequence[Request], first: int) -> int:
        return len(running) - 1

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())


POLICIES: dict[str, Callable[[], Policy]] = {"fcfs": FCFS}


def policy_named(name: str) -> Callable[[], Policy]:
    """Gives what makes a policy.

    Raises:
        ValueError: no policy has this name.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown scheduling policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
