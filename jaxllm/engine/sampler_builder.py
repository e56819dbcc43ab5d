"""SamplingParams of a step's rows -> packed arrays, stacked by data rank. Knows which sampler serves all ranks.

A rank's own rows stand in sampler_rows.py.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.rank_items import RankItems
from jaxllm.engine.sampler_inputs import ProcessorShape, SamplerLayout, SamplerShape
from jaxllm.engine.sampler_rows import (
    FILTERS,
    MASKED,
    NUM_EDITS,
    NUM_NAMED,
    RARE,
    CountReset,
    SamplerRows,
    Wishes,
    fit,
    larger_num_best,
)


class PackedSampling(NamedTuple):
    """What the runner takes for the sampler: the compiled shape, its packed inputs, and rows to count anew before."""

    layout: SamplerLayout
    packed: np.ndarray
    count_resets: tuple[CountReset, ...] = ()


class SamplerBuilder:
    """Builds the sampler's inputs of each step for rows 0..num_rows-1 of each data rank."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        processors: Mapping[str, LogitsProcessor] | None = None,
        num_ranks: int = 1,
    ):
        self._vocab_size = vocab_size
        self._processors = dict(processors or {})
        self.ranks = [SamplerRows(rank, num_rows, vocab_size, self._processors) for rank in range(num_ranks)]

    def is_needed(self, parts: Sequence[RankItems]) -> bool:
        """Says whether one of the rows that sample wants another than the best token, or more than it."""
        return any(rank.features(own) for rank, own in zip(self.ranks, parts, strict=True))

    def build(self, parts: Sequence[RankItems], num_requests: int, always: bool) -> PackedSampling | None:
        """Packs what the sampler needs; None where the best token is wanted everywhere, unless it is asked for."""
        wishes = [rank.wishes(own) for rank, own in zip(self.ranks, parts, strict=True)]
        is_wanted = always or any(each.features for each in wishes)
        if not is_wanted or not any(own.samples.any() for own in parts):
            return None
        shape = self._shape(wishes, num_requests)
        layout = SamplerLayout(shape, self._vocab_size, self._processors)
        packed = np.zeros((len(parts), layout.packed_size), np.int32)
        for rank, own, each, array in zip(self.ranks, parts, wishes, packed, strict=True):
            inputs, processor_inputs = layout.host_views(array)
            rank.write(inputs, processor_inputs, own, each)
        resets: list[CountReset] = []
        if shape.penalties:
            for rank, each in zip(self.ranks, wishes, strict=True):
                resets += rank.count_resets(each)
        return PackedSampling(layout, packed, tuple(resets))

    def _shape(self, wishes: Sequence[Wishes], num_requests: int) -> SamplerShape:
        """Gives the sampler that does what any of the ranks needs."""
        features = 0
        for each in wishes:
            features |= each.features
        num_processed = {  # in the order in which the user named them
            name: max([len(each.processed.get(name, ())) for each in wishes]) for name in self._processors
        }
        return SamplerShape(
            num_requests,
            filters=bool(features & (FILTERS | RARE)),
            penalties=bool(features & RARE),
            num_edits=fit(NUM_EDITS, max([len(each.edits) for each in wishes])) if features & RARE else 0,
            masked=bool(features & MASKED),
            num_best=larger_num_best([each.num_best for each in wishes]),
            num_named=fit(NUM_NAMED, max([each.num_named for each in wishes])),
            processors=tuple(
                ProcessorShape(name, min(1 << (most - 1).bit_length(), num_requests))
                for name, most in num_processed.items()
                if most
            ),
        )
