"""The inputs of a decode step, kept to become those of the next one: of the same requests, each a token further.

Knows what of packed inputs changes between such steps; no rows and no device.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.engine.buckets import StepShape
from jaxllm.engine.step_inputs import ends_view, host_views
from jaxllm.scheduler.batch import RankBatch


class KeptStep:
    """A step of singles alone. The device gets copies of `packed`, since it may still read the one before."""

    def __init__(
        self, parts: Sequence[RankBatch], wanted: StepShape, shape: StepShape, packed: np.ndarray, num_groups: int
    ):
        """`wanted` is the smallest shape that holds the step, `shape` the one that it runs in."""
        self.wanted = wanted
        self.shape = shape
        self.packed = packed
        self.num_tokens = tuple([len(part.singles.rows) for part in parts])
        self._num_groups = num_groups
        self._singles = [part.singles for part in parts]
        self._num_context = [sum(part.singles.offsets) for part in parts]
        self._kept: list[tuple[np.ndarray, np.ndarray]] = []
        self.block_tables: list[np.ndarray] = []

    def goes_on_as(self, parts: Sequence[RankBatch]) -> bool:
        """Says whether a step has the same requests on the same rows, and no others."""
        for part, singles in zip(parts, self._singles, strict=True):
            if part.singles is not singles or part.others:
                return False
        return True

    def advance(self, parts: Sequence[RankBatch]) -> int:
        """Goes on to the positions of a step; gives the tokens of all requests on the rank that has most of them."""
        if not self._kept:
            self._begin()
        num_context = 0
        for (offsets, ends), total, part in zip(self._kept, self._num_context, parts, strict=True):
            np.add(offsets, part.tick, out=ends)
            num_context = max(num_context, total + (part.tick + 1) * len(part.singles.rows))
        return num_context

    def _begin(self) -> None:
        self.packed = self.packed.copy()
        for array, singles in zip(self.packed, self._singles, strict=True):
            offset = np.array(singles.offsets, np.int32)
            ends = ends_view(array, self.shape, self._num_groups, len(offset))
            self._kept.append((np.stack((offset, offset + 1)), ends))
            self.block_tables.append(host_views(array, self.shape, self._num_groups).block_table)
