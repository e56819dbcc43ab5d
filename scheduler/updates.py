"""What a step brought its requests. Knows updates and columns of singles; chooses and ends nothing.

A step brings most requests a token and nothing else. Those tokens stay columns until somebody wants to see an update of
each; of quiet requests, whose tokens are told when they end, nobody does.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, overload

from jaxllm.scheduler.batch import Singles
from jaxllm.scheduler.request import Request, RequestUpdate, WeightVersion


class SinglesTokens(NamedTuple):
    """The tokens of a step's singles. `instead` has what came of those that do not go on: None if they ended before."""

    singles: Singles
    tick: int
    token_ids: Sequence[int]
    instead: dict[Request, RequestUpdate | None]
    weight_version: WeightVersion

    def going_on(self) -> Iterator[tuple[Request, int]]:
        """Gives the tokens of those that go on and are not quiet."""
        singles = self.singles
        if singles.num_quiet == len(singles.requests):
            return iter(())
        pairs = zip(singles.requests, self.token_ids, strict=False)  # the other tokens are not of singles
        if not self.instead and not singles.num_quiet:
            return pairs
        return ((r, token) for r, token in pairs if not r.is_quiet and r not in self.instead)

    def updates(self) -> Iterator[RequestUpdate]:
        """Makes an update of each, in the order of the singles."""
        singles, instead, tick = self.singles, self.instead, self.tick
        if singles.num_quiet == len(singles.requests) and not instead:
            return
        for request, token, offset in zip(singles.requests, self.token_ids, singles.offsets, strict=False):
            if request in instead:
                update = instead[request]
                if update is not None:
                    yield update
            elif not request.is_quiet:
                yield RequestUpdate(
                    request.request_id,
                    (token,),
                    num_prompt_tokens=request.num_prompt,
                    num_output_tokens=offset + tick + 2 - request.num_prompt,
                    num_cached_tokens=request.num_cached_tokens,
                    first_scheduled_time=request.first_scheduled_time,
                    weight_version=self.weight_version,
                )


class StepUpdates(Sequence[RequestUpdate]):
    """The updates of a step in the order of its items; made when they are first looked at."""

    def __init__(self, parts: Sequence[SinglesTokens | list[RequestUpdate]] = (), num_quiet: int = 0):
        """`num_quiet` counts the tokens of quiet requests among those of singles."""
        self.num_quiet = num_quiet
        self._parts = parts
        self._made: list[RequestUpdate] | None = None

    def going_on(self) -> Iterator[tuple[Request, int]]:
        """Gives the requests that got a token and nothing else, for those who need no update of them."""
        return chain.from_iterable(part.going_on() for part in self._parts if isinstance(part, SinglesTokens))

    def others(self) -> Iterator[RequestUpdate]:
        """Gives the updates of all that `going_on` leaves out."""
        for part in self._parts:
            if isinstance(part, list):
                yield from part
            else:
                yield from (update for update in part.instead.values() if update is not None)

    def all(self) -> list[RequestUpdate]:
        """Gives all updates; they are the same objects each time."""
        if self._made is None:
            self._made = []
            for part in self._parts:
                self._made += part if isinstance(part, list) else part.updates()
        return self._made

    def behind(self, earlier: list[RequestUpdate]) -> "StepUpdates":
        """Gives these behind other updates."""
        return StepUpdates((earlier, *self._parts), self.num_quiet) if earlier else self

    def __iter__(self) -> Iterator[RequestUpdate]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    @overload
    def __getitem__(self, index: int) -> RequestUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestUpdate]: ...
    def __getitem__(self, index: int | slice) -> RequestUpdate | list[RequestUpdate]:
        return self.all()[index]

    def __add__(self, other: Iterable[RequestUpdate]) -> list[RequestUpdate]:
        return [*self, *other]

    def __radd__(self, other: Iterable[RequestUpdate]) -> list[RequestUpdate]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.all() == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"StepUpdates({self.all()!r}, num_quiet={self.num_quiet})"
