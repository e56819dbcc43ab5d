"""A data rank's part of a step as columns. Knows what the scheduler decided: no tokens, no padding, no arrays' layout."""

from typing import NamedTuple

import numpy as np

from jaxllm.scheduler.batch import RankBatch, Scheduled


class RankItems(NamedTuple):
    """What a data rank computes in a step, a row for each of its B requests, which may be none."""

    items: tuple[Scheduled, ...]
    row: np.ndarray
    start: np.ndarray
    end: np.ndarray  # behind the last token of the step
    samples: np.ndarray
    num_tokens: int

    @property
    def count(self) -> np.ndarray:
        return self.end - self.start

    @property
    def is_single(self) -> bool:
        """Says whether each request has one token."""
        return self.num_tokens == len(self.items)


def rank_items(part: RankBatch) -> RankItems:
    """Gives the columns of what the scheduler decided."""
    items, B, num_tokens = part.items, len(part.items), part.num_tokens
    start = np.fromiter([item.start for item in items], np.int64, B)
    is_single = num_tokens == B
    return RankItems(
        items,
        row=np.fromiter([item.row for item in items], np.int64, B),
        start=start,
        end=start + (1 if is_single else np.fromiter([item.count for item in items], np.int64, B)),
        samples=np.fromiter([item.samples for item in items], bool, B),
        num_tokens=num_tokens,
    )
