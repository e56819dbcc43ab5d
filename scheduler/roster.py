"""Where every living request stands, and the rows of the running ones. Knows no blocks and no tokens."""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush

from jaxllm.scheduler.policy import CountCached, Policy
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.siblings import Siblings


class Roster:
    """Every living request is in one place: in the policy's queue, held back as a sibling, running, or paused."""

    def __init__(self, policy: Policy, num_rows: int) -> None:
        self.policy = policy
        self.siblings = Siblings()
        self.living: dict[str, Request] = {}
        self.running: list[Request] = []  # the best rank first
        self.num_rows = num_rows
        self.num_arrived = 0
        self._free_rows = list(range(num_rows))  # a heap
        self._paused: dict[str, Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self.living) - len(self.running) - len(self._paused)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    @property
    def has_free_row(self) -> bool:
        return bool(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def enter(self, requests: Sequence[Request]) -> None:
        """Puts new requests, samples of one prompt, behind those that came before."""
        for request in requests:
            self.num_arrived += 1
            request.order = self.num_arrived
        self.place(requests)

    def place(self, requests: Sequence[Request]) -> None:
        """Puts samples of one prompt where their order says."""
        self.living |= {request.request_id: request for request in requests}
        if len(requests) > 1:
            self.siblings.hold(requests)
        self.policy.push(requests[0])

    def release_siblings(self) -> None:
        """Lets those join the queue whose prompt an earlier step has computed."""
        for request in self.siblings.release():
            self.policy.push(request)

    def head(self, num_cached: CountCached) -> Request | None:
        """Gives the waiting request that is to run next."""
        return self.policy.head(num_cached)

    def start(self, request: Request) -> int:
        """Gives the head of the queue a row."""
        self.policy.remove(request)
        self.siblings.start(request)
        row = request.row = heappop(self._free_rows)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=self.policy.rank)
        return row

    def send_back(self, request: Request) -> None:
        """Takes the row of a running request, which waits again in its old place."""
        self.running.remove(request)
        self._take_row(request)
        request.status = RequestStatus.WAITING
        self.policy.push(request)

    def pause(self, request: Request) -> None:
        """Takes a waiting or running request aside."""
        self._leave(request)
        request.status = RequestStatus.PAUSED
        self._paused[request.request_id] = request

    def resume(self, request: Request) -> None:
        """Puts a paused request where it would wait by now."""
        del self._paused[request.request_id]
        request.status = RequestStatus.WAITING
        self.policy.push(request)

    def end(self, request: Request) -> None:
        """Takes a living request out, wherever it stands."""
        if self._paused.pop(request.request_id, None) is None:
            self._leave(request)
        request.status = RequestStatus.FINISHED
        del self.living[request.request_id]

    def check(self) -> None:
        """Every living request is in one place, and every row free or somebody's."""
        waiting, held = list(self.policy), [r for group in self.siblings.groups() for r in group.held.values()]
        for request in waiting + held:
            request.check_waiting()
        for request in self._paused.values():
            request.check_paused()
        everywhere = [*self.running, *waiting, *held, *self._paused.values()]
        assert all(self.living.get(request.request_id) is request for request in everywhere)
        assert len(self.living) == len(everywhere), "a living request is nowhere, or twice"
        ranks = [self.policy.rank(request) for request in self.running]
        assert ranks == sorted(ranks), "the running requests are not in the order of their ranks"
        rows = [request.row for request in self.running] + self._free_rows
        assert Counter(rows) == Counter(range(self.num_rows)), "a row is lost or has two owners"

    def _leave(self, request: Request) -> None:
        if self.siblings.is_held(request):
            self.siblings.leave(request)
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._take_row(request)
        else:
            self.policy.remove(request)
        successor = self.siblings.leave(request)
        if successor is not None:
            self.policy.push(successor)

    def _take_row(self, request: Request) -> None:
        assert request.row is not None
        heappush(self._free_rows, request.row)
        request.row = None
