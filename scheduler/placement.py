"""Which data rank a waiting request should start on. Knows prefixes and how full the ranks are; it starts nothing.

Where the longest beginning of a request is cached it costs least, and so the samples of one prompt come together. But a
rank that has many tokens in flight beyond the others makes all of them wait in every step, so there a limit is set.
"""

from collections.abc import Sequence

from jaxllm.scheduler.data_rank import DataRank
from jaxllm.scheduler.kv_cache import Prefix
from jaxllm.scheduler.request import Request


class Placement:
    """Orders the ranks for a request: by cached prefix as long as they are balanced, then by the blocks they have left.

    A cached prefix draws a request to a rank that has at most `imbalance` tokens in flight more than the mean.
    """

    def __init__(self, ranks: Sequence[DataRank], imbalance: int) -> None:
        self._ranks = ranks
        self._imbalance = imbalance
        self._loads: list[int] | None = None  # tokens in flight by rank, counted where they are needed

    def begin(self) -> None:
        """Begins a step, in which the ranks have other loads than before."""
        self._loads = None

    def order(self, request: Request, ranks: Sequence[DataRank]) -> list[tuple[DataRank, Prefix]]:
        """Gives some ranks, the one to try first in front, each with what it has cached of the request."""
        found = [(rank, rank.prefix(request)) for rank in ranks]
        return sorted(found, key=lambda one: self._place(*one)) if len(found) > 1 else found

    def add(self, request: Request, rank: DataRank) -> None:
        """Takes note of where a request has started."""
        if self._loads is not None:
            self._loads[rank.index] += request.num_tokens

    def _place(self, rank: DataRank, prefix: Prefix) -> tuple[int, int, int]:
        draws = prefix.num_tokens > 0 and not self._is_crowded(rank)
        return -prefix.num_tokens if draws else 0, -rank.num_blocks_left, rank.index

    def _is_crowded(self, rank: DataRank) -> bool:
        if self._loads is None:
            self._loads = [each.num_tokens_in_flight for each in self._ranks]
        return self._loads[rank.index] > sum(self._loads) / len(self._loads) + self._imbalance
