"""Parallel samples of one prompt: one computes it, the others wait for that. Knows requests: no blocks, no queue."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxllm.scheduler.request import Request


@dataclass(slots=True, eq=False)
class _Group:
    """The samples of one prompt that have not started, and the one that computes it for them."""

    leader: Request
    held: dict[str, Request]  # wait for the leader's prompt
    released: dict[str, Request]  # wait for admission
    ready_on: int | None = None  # the data rank where an earlier step has computed the leader's prompt


class Siblings:
    """Holds back the siblings of each group's leader until its prompt is computed, and names it as their source."""

    def __init__(self) -> None:
        self._group_of: dict[str, _Group] = {}  # of leaders and of siblings that have not started
        self._started: dict[str, _Group] = {}  # by leader: the groups whose leader has ever run

    @property
    def num_held(self) -> int:
        return sum([len(group.held) for group in self.groups()])

    def groups(self) -> Iterator[_Group]:
        return (group for name, group in self._group_of.items() if group.leader.request_id == name)

    def hold(self, requests: Sequence[Request]) -> None:
        """Forms a group; the first request leads it and is not held."""
        leader, *others = requests
        group = _Group(leader, {request.request_id: request for request in others}, {})
        self._group_of |= {request.request_id: group for request in requests}

    def start(self, request: Request) -> None:
        """Takes note that a request has a row now."""
        group = self._group_of.get(request.request_id)
        if group is None:
            return
        if group.leader is request:
            self._started[request.request_id] = group
        else:
            self._drop(group, request)

    def release(self) -> list[Request]:
        """Gives the siblings whose prompt has been computed since; to be called before a step is put together."""
        released: list[Request] = []
        for group in self._started.values():
            leader = group.leader
            group.ready_on = leader.data_rank if leader.num_computed >= leader.num_prompt else None
            if group.ready_on is not None and group.held:
                released += group.held.values()
                group.released |= group.held
                group.held = {}
        return released

    def source(self, request: Request, data_rank: int) -> Request | None:
        """Gives the request whose blocks a sibling can share on a data rank, in the step that is being put together."""
        group = self._group_of.get(request.request_id)
        if group is None or group.ready_on != data_rank or group.leader is request:
            return None
        return group.leader if group.leader.data_rank == data_rank else None

    def is_held(self, request: Request) -> bool:
        group = self._group_of.get(request.request_id)
        return group is not None and request.request_id in group.held

    def leave(self, request: Request) -> Request | None:
        """Takes out a request that ends or pauses; gives the sibling that leads the held ones in its place, if any."""
        group = self._group_of.get(request.request_id)
        if group is None:
            return None
        if group.leader is not request:
            self._drop(group, request)
            return None
        members = list(group.held.values())
        self._dissolve(group)
        if len(members) > 1:
            self.hold(members)
        return members[0] if members else None

    def _drop(self, group: _Group, request: Request) -> None:
        del self._group_of[request.request_id]
        group.held.pop(request.request_id, None)
        group.released.pop(request.request_id, None)
        if not group.held and not group.released:
            self._dissolve(group)

    def _dissolve(self, group: _Group) -> None:
        for name in (group.leader.request_id, *group.held, *group.released):
            del self._group_of[name]
        self._started.pop(group.leader.request_id, None)
