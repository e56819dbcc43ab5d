"""A data rank's part of a step as columns. Knows what the scheduler decided: no tokens and no padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.scheduler.batch import NO_SINGLES, RankBatch, Scheduled, Singles


@dataclass(slots=True)
class RankItems:
    """What a data rank computes in a step, a row for each of its B requests, which may be none; the singles first."""

    part: RankBatch
    num_requests: int
    row: np.ndarray
    start: np.ndarray
    count: np.ndarray
    end: np.ndarray  # behind the last token of the step
    samples: np.ndarray
    sampling_row: np.ndarray  # the rows of those that sample
    num_tokens: int

    @property
    def items(self) -> tuple[Scheduled, ...]:
        return self.part.items

    @property
    def num_singles(self) -> int:
        return len(self.part.singles.rows)

    @property
    def is_single(self) -> bool:
        """Says whether each request has one token."""
        return self.num_tokens == self.num_requests


class SinglesColumns:
    """The singles of a rank as columns, which serve all steps in which they stay the same."""

    def __init__(self, singles: Singles = NO_SINGLES) -> None:
        self.singles = singles
        S = len(singles.rows)
        self.row = np.fromiter(singles.rows, np.int64, S)
        self.offset = np.fromiter(singles.offsets, np.int64, S)
        self._one = np.ones(S, np.int64)
        self._place: dict[int, int] | None = None
        self._samples = np.ones(S, bool)

    def places(self, rows: Sequence[int]) -> list[int]:
        """Gives the places of some rows."""
        if self._place is None:
            self._place = {row: place for place, row in enumerate(self.singles.rows)}
        return [self._place[row] for row in rows]

    def items(self, part: RankBatch) -> RankItems:
        """Gives the columns of a step that these are part of."""
        others, S = part.others, len(self.row)
        start = self.offset + part.tick
        if not others:
            return RankItems(part, S, self.row, start, self._one, start + 1, self._samples, self.row, S)
        numbers = np.array([(item.row, item.start, item.count, item.samples) for item in others], np.int64).T
        row = np.concatenate((self.row, numbers[0]))
        start = np.concatenate((start, numbers[1]))
        count = np.concatenate((self._one, numbers[2]))
        samples = np.concatenate((self._samples, numbers[3].astype(bool)))
        num_tokens = int(numbers[2].sum()) + S
        return RankItems(part, len(row), row, start, count, start + count, samples, row[samples], num_tokens)


def rank_items(part: RankBatch) -> RankItems:
    """Gives the columns of one step."""
    return SinglesColumns(part.singles).items(part)
