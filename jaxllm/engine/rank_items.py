"""A data rank's part of a step as columns. Knows what the scheduler decided: no tokens and no padding."""

from dataclasses import dataclass

import numpy as np

from jaxllm.scheduler.batch import NO_SINGLES, RankBatch, Scheduled


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


class ItemColumns:
    """Makes the columns of a rank's steps; those of singles are made once for all steps that they stay the same in."""

    def __init__(self) -> None:
        self._singles = NO_SINGLES
        self._row = self._offset = self._one = np.zeros(0, np.int64)
        self._samples = np.zeros(0, bool)

    def of(self, part: RankBatch) -> RankItems:
        """Gives the columns of what the scheduler decided."""
        singles, others, S = part.singles, part.others, len(part.singles.rows)
        if singles is not self._singles:
            self._singles = singles
            self._row, self._offset = np.array((singles.rows, singles.offsets), np.int64)
            self._one, self._samples = np.ones(S, np.int64), np.ones(S, bool)
        if not others:
            start = self._offset + part.tick
            return RankItems(part, S, self._row, start, self._one, start + 1, self._samples, self._row, S)
        columns = np.array([(item.row, item.start, item.count, item.samples) for item in others], np.int64).T
        if not S:
            row, start, count, samples = *columns[:3], columns[3].astype(bool)
        else:
            row = np.concatenate((self._row, columns[0]))
            start = np.concatenate((self._offset + part.tick, columns[1]))
            count = np.concatenate((self._one, columns[2]))
            samples = np.concatenate((self._samples, columns[3].astype(bool)))
        return RankItems(
            part, S + len(others), row, start, count, start + count, samples, row[samples], int(count.sum())
        )


def rank_items(part: RankBatch) -> RankItems:
    """Gives the columns of one step."""
    return ItemColumns().of(part)
