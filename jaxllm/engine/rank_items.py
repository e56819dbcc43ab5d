"""A data rank's part of a step as columns. Knows what the scheduler decided: no tokens and no padding."""

from dataclasses import dataclass

import numpy as np

from jaxllm.scheduler.batch import RankBatch, Scheduled


@dataclass(slots=True)
class RankItems:
    """What a data rank computes in a step, a row for each of its B requests, which may be none."""

    items: tuple[Scheduled, ...]
    row: np.ndarray
    start: np.ndarray
    count: np.ndarray
    end: np.ndarray  # behind the last token of the step
    samples: np.ndarray
    sampling_row: np.ndarray  # the rows of those that sample
    num_tokens: int

    @property
    def is_single(self) -> bool:
        """Says whether each request has one token."""
        return self.num_tokens == len(self.items)


def rank_items(part: RankBatch) -> RankItems:
    """Gives the columns of what the scheduler decided."""
    items, B, num_tokens = part.items, len(part.items), part.num_tokens
    row = np.fromiter([item.row for item in items], np.int64, B)
    start = np.fromiter([item.start for item in items], np.int64, B)
    count = np.ones(B, np.int64) if num_tokens == B else np.fromiter([item.count for item in items], np.int64, B)
    samples = np.fromiter([item.samples for item in items], bool, B)
    return RankItems(items, row, start, count, start + count, samples, row[samples], num_tokens)
