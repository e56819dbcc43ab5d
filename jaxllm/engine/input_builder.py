"""ScheduledBatch -> packed arrays. Knows requests' tokens and tables; no device, no scheduling.

Keeps a host copy of every row's block tables, so that a step copies rows instead of walking lists. What the sampler
needs is built beside it.
"""

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.buckets import Buckets, StepShape
from jaxllm.engine.sampler_builder import PackedSampling, SamplerBuilder, best_size
from jaxllm.engine.step_inputs import UNKNOWN_TOKEN, StepInputs, host_views, packed_size
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduled, ScheduledBatch


class PromptRun(NamedTuple):
    """Consecutive tokens of one prompt that a step scores: `position` is the first one's index in the prompt."""

    request: Request
    position: int
    num_tokens: int


class PromptScoring(NamedTuple):
    """Which tokens of prompts a step scores: [2, N], the flat token before each and the token itself; in runs."""

    index_and_token: np.ndarray
    num_best: int
    runs: tuple[PromptRun, ...]


class PackedStep(NamedTuple):
    """What the runner takes: the compiled shape, its packed inputs, and blocks to copy (from, to) before the step.

    `sampling` is for the sampler's program, where the step does not choose tokens itself.
    """

    shape: StepShape
    packed: np.ndarray
    copies: tuple[tuple[int, int], ...] = ()
    sampling: PackedSampling | None = None
    prompt: PromptScoring | None = None


class InputBuilder:
    """Builds the inputs of each step for rows 0..max_num_seqs-1; row max_num_seqs is the spare one of padding."""

    def __init__(
        self,
        buckets: Buckets,
        max_num_seqs: int,
        max_blocks: int,
        num_groups: int,
        *,
        vocab_size: int,
        seed: int = 0,
        processors: Mapping[str, LogitsProcessor] | None = None,
        choose: Callable[[StepShape], StepShape] = lambda shape: shape,
    ):
        """`choose` may give another shape that holds the step too, as long as its own is being compiled."""
        self._buckets = buckets
        self._choose = choose
        self._num_groups = num_groups
        self._vocab_size = vocab_size
        self._sampler = SamplerBuilder(max_num_seqs + 1, vocab_size, processors)
        rows = max_num_seqs + 1
        self._spare_row = max_num_seqs
        self._tables = np.zeros((num_groups, rows, max_blocks), np.int32)
        self._owner: list[Request | None] = [None] * rows
        self._num_blocks = np.zeros((num_groups, rows), np.int64)  # of the tables, already copied
        self._num_preemptions = [0] * rows
        self._num_scored = 0  # running requests that want their prompt scored; most steps need not look
        self._scored = [False] * rows
        self._random = random.Random(seed)

    def draw_seed(self) -> int:
        """A seed for a request that brings none: drawn once, at admission, and kept."""
        return self._random.getrandbits(64)

    def forget_rows(self) -> None:
        """Copies everything anew at the next step: the tables were given back behind its back."""
        self._owner = [None] * len(self._owner)

    def build(self, batch: ScheduledBatch) -> PackedStep:
        """Packs the batch into the smallest shape that holds it and may be used."""
        items = batch.items
        for item in items:
            self._refresh_row(item)
        rows = np.fromiter((item.row for item in items), np.int64, len(items))
        num_tokens = sum([item.count for item in items])
        table_width = int(self._num_blocks[:, rows].max())
        prompt = self._prompt_scoring(items) if self._num_scored else None
        variant = "hidden" if prompt else "logits" if self._sampler.is_needed(items) else "greedy"
        shape = self._choose(self._buckets.shape(num_tokens, len(items), table_width, variant))
        sampling = None
        if shape.variant != "greedy":
            always = prompt is not None or variant == "greedy"
            sampling = self._sampler.build(items, rows, shape.num_requests, always=always)
        # Fresh each time: the device may still read the one before.
        packed = np.zeros(packed_size(shape, self._num_groups), np.int32)
        inputs = host_views(packed, shape, self._num_groups)
        self._write_tokens(inputs, items)
        B, M = len(items), shape.table_width
        inputs.row[:B] = rows
        inputs.row[B:] = self._spare_row
        inputs.samples[:B] = [item.samples for item in items]
        inputs.block_table[:, :B] = self._tables[:, rows, :M]
        return PackedStep(shape, packed, batch.copies, sampling, prompt)

    def _prompt_scoring(self, items: tuple[Scheduled, ...]) -> PromptScoring | None:
        index, token, num_best, runs, flat = [], [], [], [], 0
        for item in items:
            request = item.request
            if self._scored[item.row]:
                assert isinstance(request.params, SamplingParams)
                position = max(item.start + 1, request.params.prompt_logprob_start)
                stop = min(item.start + item.count + 1, request.num_prompt)
                if position < stop:
                    before = flat + position - 1 - item.start
                    index += range(before, before + stop - position)
                    token += request.prompt_ids[position:stop]
                    num_best.append(request.params.prompt_logprobs or 0)
                    runs.append(PromptRun(request, position, stop - position))
            flat += item.count
        if not runs:
            return None
        most = -1 if min(num_best) < 0 else max(num_best)
        return PromptScoring(np.asarray([index, token], np.int32), best_size(most, self._vocab_size), tuple(runs))

    def _write_tokens(self, inputs: StepInputs[np.ndarray], items: tuple[Scheduled, ...]) -> None:
        tokens, starts, counts = [], [], []
        for item in items:
            tokens += known_tokens(item.request, item.start, item.count)
            starts.append(item.start)
            counts.append(item.count)
        T, B = len(tokens), len(items)
        count_B, start_B = np.asarray(counts, np.int64), np.asarray(starts, np.int64)
        ends_B = np.cumsum(count_B)
        request_T = np.repeat(np.arange(B), count_B)
        inputs.token[:T] = tokens
        inputs.position[:T] = np.arange(T) + (start_B - (ends_B - count_B))[request_T]
        inputs.position[T:] = -1
        inputs.request[:T] = request_T
        inputs.request[T:] = max(B - 1, 0)
        inputs.query_start[1 : B + 1] = ends_B
        inputs.query_start[B + 1 :] = T
        if inputs.token.shape == inputs.row.shape:  # the decode program: one token per request, padding included
            inputs.query_start[:] = np.arange(inputs.query_start.shape[0])
            inputs.request[:] = np.arange(inputs.request.shape[0])
        inputs.context_len[:B] = start_B + count_B

    def _refresh_row(self, item: Scheduled) -> None:
        request, row = item.request, item.row
        if self._owner[row] is not request or self._num_preemptions[row] != request.num_preemptions:
            self._owner[row] = request
            self._num_preemptions[row] = request.num_preemptions
            self._tables[:, row] = 0
            self._num_blocks[:, row] = 0
            self._sampler.set_row(row, request)
            assert isinstance(request.params, SamplingParams)
            scored = request.params.prompt_logprobs is not None
            self._num_scored += scored - self._scored[row]
            self._scored[row] = scored
        for group, table in enumerate(request.block_tables):
            known = self._num_blocks[group, row]
            if len(table) > known:
                self._tables[group, row, known : len(table)] = table[known:]
                self._num_blocks[group, row] = len(table)


def known_tokens(request: Request, start: int, count: int) -> list[int]:
    """Tokens start..start+count of a request; UNKNOWN_TOKEN for one that only the device knows so far."""
    split = len(request.prompt_ids)
    stop = start + count
    tokens = request.prompt_ids[start : min(stop, split)] if start < split else []
    if stop > split:
        tokens = tokens + request.output_ids[max(start - split, 0) : stop - split]
    return tokens + [UNKNOWN_TOKEN] * (count - len(tokens))
