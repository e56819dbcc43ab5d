"""Where every living request stands, and the rows of the running ones by data rank. Knows no blocks and no tokens."""

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from jaxllm.scheduler.policy import CountCached, Policy
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.siblings import Siblings


class Rows:
    """The rows of one data rank, and who runs on them."""

    def __init__(self, data_rank: int, num_rows: int) -> None:
        self.data_rank = data_rank
        self.num_rows = num_rows
        self.running: list[Request] = []  # the best rank of the policy first
        self.num_changes = 0  # how often one of them left, or came before another
        self._free = list(range(num_rows))  # a heap

    @property
    def num_free(self) -> int:
        return len(self._free)

    def give(self, request: Request) -> int:
        """Gives a request a row."""
        request.data_rank = self.data_rank
        row = request.row = heappop(self._free)
        return row

    def take_back(self, request: Request) -> None:
        """Takes the row of a running request."""
        assert request.row is not None
        self.running.remove(request)
        self.num_changes += 1
        heappush(self._free, request.row)
        request.row = request.data_rank = None

    def check(self) -> None:
        """Every row is free or somebody's."""
        assert all(request.data_rank == self.data_rank for request in self.running)
        rows = [request.row for request in self.running] + self._free
        assert Counter(rows) == Counter(range(self.num_rows)), "a row is lost or has two owners"


class Roster:
    """Every living request is in one place: in the policy's queue, held back as a sibling, running, or paused."""

    def __init__(self, policy: Policy, num_rows: int, num_ranks: int = 1) -> None:
        self.policy = policy
        self.siblings = Siblings()
        self.living: dict[str, Request] = {}
        self.rows = tuple(Rows(rank, num_rows) for rank in range(num_ranks))
        self.num_arrived = 0
        self._paused: dict[str, Request] = {}

    @property
    def num_running(self) -> int:
        return sum([len(rows.running) for rows in self.rows])

    @property
    def num_waiting(self) -> int:
        return len(self.living) - self.num_running - len(self._paused)

    @property
    def num_paused(self) -> int:
        return len(self._paused)

    def running(self) -> Iterator[Request]:
        return (request for rows in self.rows for request in rows.running)

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

    def start(self, request: Request, rows: Rows) -> int:
        """Gives the head of the queue one of these rows."""
        self.policy.remove(request)
        self.siblings.start(request)
        row = rows.give(request)
        request.status = RequestStatus.RUNNING
        insort(rows.running, request, key=self.policy.rank)
        rows.num_changes += rows.running[-1] is not request
        return row

    def send_back(self, request: Request) -> None:
        """Takes the row of a running request, which waits again in its old place."""
        self._rows_of(request).take_back(request)
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
        everywhere = [*self.running(), *waiting, *held, *self._paused.values()]
        assert all(self.living.get(request.request_id) is request for request in everywhere)
        assert len(self.living) == len(everywhere), "a living request is nowhere, or twice"
        for rows in self.rows:
            rows.check()
            ranks = [self.policy.rank(request) for request in rows.running]
            assert ranks == sorted(ranks), "the running requests are not in the order of their ranks"

    def _leave(self, request: Request) -> None:
        if self.siblings.is_held(request):
            self.siblings.leave(request)
            return
        if request.status is RequestStatus.RUNNING:
            self._rows_of(request).take_back(request)
        else:
            self.policy.remove(request)
        successor = self.siblings.leave(request)
        if successor is not None:
            self.policy.push(successor)

    def _rows_of(self, request: Request) -> Rows:
        assert request.data_rank is not None
        return self.rows[request.data_rank]
