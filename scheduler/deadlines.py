"""Which requests are due by when. Knows requests and times on a clock that is not its own."""

from heapq import heapify, heappop, heappush

from jaxllm.scheduler.request import Request, RequestStatus

_SLACK = 64


class Deadlines:
    """A heap of deadlines; those of requests that ended stay in it until they are passed or outnumber the others."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request, num_living: int) -> None:
        """Takes note of a request's deadline, if it has one."""
        if request.deadline is None:
            return
        if len(self._heap) > 2 * num_living + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2].status is not RequestStatus.FINISHED]
            heapify(self._heap)
        heappush(self._heap, (request.deadline, request.order, request))

    def due(self, now: float) -> list[Request]:
        """Takes out and gives the living requests whose deadline is not later than `now`."""
        due: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heappop(self._heap)
            if request.status is not RequestStatus.FINISHED:
                due.append(request)
        return due

    def __len__(self) -> int:
        return len(self._heap)
