"""ScheduledBatch -> packed arrays, stacked by data rank. Knows which shape holds all ranks; no device, no scheduling.

All ranks of a step run one program, which holds the largest of them. What a rank's own part is made of stands in
rank_rows.py, what the sampler needs in sampler_builder.py.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.buckets import Buckets, StepShape
from jaxllm.engine.kept_step import KeptStep
from jaxllm.engine.rank_items import RankItems
from jaxllm.engine.rank_rows import RankRows
from jaxllm.engine.sampler_builder import PackedSampling, SamplerBuilder
from jaxllm.engine.sampler_rows import best_size
from jaxllm.engine.step_inputs import host_views, packed_size
from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.request import Request


class PromptRun(NamedTuple):
    """Consecutive tokens of one prompt that a step scores: `position` is the first one's index in the prompt."""

    request: Request
    position: int
    num_tokens: int


class PromptScoring(NamedTuple):
    """Which tokens of prompts a step scores: [R, 2, N], the flat token before each and the token itself; in runs.

    Each data rank has runs of its own; N holds the longest of them, the rest is padding.
    """

    index_and_token: np.ndarray
    num_best: int
    runs: tuple[tuple[PromptRun, ...], ...]


class PackedStep(NamedTuple):
    """What the runner takes: the compiled shape, its packed inputs, and blocks to copy (from, to) before the step.

    Inputs are stacked by data rank, copies come for each rank, or there are none.
    `sampling` is for the sampler's program, where the step does not choose tokens itself.
    """

    shape: StepShape
    packed: np.ndarray
    copies: tuple[tuple[tuple[int, int], ...], ...] = ()
    sampling: PackedSampling | None = None
    prompt: PromptScoring | None = None
    num_tokens: tuple[int, ...] = ()  # of each rank, without padding
    num_context: int = 0  # tokens of all requests up to and including the step's, on the rank that has most of them


class InputBuilder:
    """Builds the inputs of each step for rows 0..max_num_seqs-1 of each data rank."""

    def __init__(
        self,
        buckets: Buckets,
        max_num_seqs: int,
        max_blocks: int,
        num_groups: int,
        *,
        vocab_size: int,
        num_ranks: int = 1,
        seed: int = 0,
        processors: Mapping[str, LogitsProcessor] | None = None,
        choose: Callable[[StepShape], StepShape] = lambda shape: shape,
    ):
        """`choose` may give another shape that holds the step too, as long as its own is being compiled."""
        self._buckets = buckets
        self._choose = choose
        self._num_groups = num_groups
        self._vocab_size = vocab_size
        self._sampler = SamplerBuilder(max_num_seqs + 1, vocab_size, processors, num_ranks)
        self._ranks = [RankRows(max_num_seqs, max_blocks, num_groups, rows) for rows in self._sampler.ranks]
        self._random = random.Random(seed)
        self._kept: KeptStep | None = None  # the last step, if it was a decode step of requests that go on

    def draw_seed(self) -> int:
        """A seed for a request that brings none: drawn once, at admission, and kept."""
        return self._random.getrandbits(64)

    def build(self, batch: ScheduledBatch) -> PackedStep:
        """Packs the batch into the smallest shape that holds it and may be used.

        It needs all batches of a scheduler, in order.
        """
        for rank, part in zip(self._ranks, batch.ranks, strict=True):
            rank.take(part)
        return self._advance(batch) or self._build(batch)

    def _build(self, batch: ScheduledBatch) -> PackedStep:
        parts = [rank.items(part) for rank, part in zip(self._ranks, batch.ranks, strict=True)]
        prompt = self._prompt_scoring(parts) if any(rank.num_scored for rank in self._ranks) else None
        variant = "hidden" if prompt else "logits" if self._sampler.is_needed(parts) else "greedy"
        num_tokens = tuple([own.num_tokens for own in parts])
        width = max([rank.table_width(own) for rank, own in zip(self._ranks, parts, strict=True)])
        wanted = self._buckets.shape(
            max(num_tokens),
            max([own.num_requests for own in parts]),
            width,
            variant,
            is_mixed=not all(own.is_single for own in parts),
        )
        shape = self._choose(wanted)
        sampling = None
        if shape.variant != "greedy":
            always = prompt is not None or variant == "greedy"
            sampling = self._sampler.build(parts, shape.num_requests, always)
        # Fresh each time: the device may still read the one before.
        packed = np.zeros((len(parts), packed_size(shape, self._num_groups)), np.int32)
        views = [host_views(array, shape, self._num_groups) for array in packed]
        for rank, own, inputs in zip(self._ranks, parts, views, strict=True):
            rank.write(inputs, own, width, shape.program == "decode")
        has_others = any(part.others for part in batch.ranks)
        self._kept = None if has_others else KeptStep(batch.ranks, wanted, shape, packed, self._num_groups)
        copies = tuple([part.copies for part in batch.ranks])
        return PackedStep(
            shape,
            packed,
            copies if any(copies) else (),
            sampling,
            prompt,
            num_tokens,
            max([part.num_context for part in batch.ranks]),
        )

    def _advance(self, batch: ScheduledBatch) -> PackedStep | None:
        """Makes the step out of the last one, if it is a decode step of the same requests in the same shape."""
        kept, parts = self._kept, batch.ranks
        if kept is None or not kept.goes_on_as(parts) or self._choose(kept.wanted) != kept.shape:
            return None
        num_context = kept.advance(parts)
        for rank, block_table, part in zip(self._ranks, kept.block_tables, parts, strict=True):
            if rank.advance(block_table, part) > kept.wanted.table_width:
                return None
        sampling = None
        if kept.shape.variant != "greedy":
            own = [rank.items(part) for rank, part in zip(self._ranks, parts, strict=True)]
            sampling = self._sampler.build(own, kept.shape.num_requests, always=kept.wanted.variant == "greedy")
        return PackedStep(kept.shape, kept.packed.copy(), (), sampling, None, kept.num_tokens, num_context)

    def _prompt_scoring(self, parts: Sequence[RankItems]) -> PromptScoring | None:
        told = [_scored_tokens(rank, own) for rank, own in zip(self._ranks, parts, strict=True)]
        runs = tuple([tuple(runs) for _, runs in told])
        wanted = [_num_best(run.request) for of_rank in runs for run in of_rank]
        if not wanted:
            return None
        array = np.zeros((len(parts), 2, max(len(pairs) for pairs, _ in told)), np.int32)
        for rank, (pairs, _) in enumerate(told):
            array[rank, :, : len(pairs)] = np.asarray(pairs, np.int32).reshape(-1, 2).T
        return PromptScoring(array, best_size(-1 if min(wanted) < 0 else max(wanted), self._vocab_size), runs)


def _scored_tokens(rank: RankRows, own: RankItems) -> tuple[list[tuple[int, int]], list[PromptRun]]:
    """Lists (the flat token before, the token) for the scored prompt tokens of a rank, and the runs of them."""
    pairs, runs, flat = [], [], own.num_singles  # which have no token of a prompt
    for item in own.part.others:
        request = item.request
        if rank.scored[item.row]:
            assert isinstance(request.params, SamplingParams)
            position = max(item.start + 1, request.params.prompt_logprob_start)
            stop = min(item.start + item.count + 1, request.num_prompt)
            if position < stop:
                before = flat + position - 1 - item.start
                pairs += zip(range(before, before + stop - position), request.prompt_ids[position:stop], strict=True)
                runs.append(PromptRun(request, position, stop - position))
        flat += item.count
    return pairs, runs


def _num_best(request: Request) -> int:
    assert isinstance(request.params, SamplingParams)
    return request.params.prompt_logprobs or 0
