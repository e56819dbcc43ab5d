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
    """Which tokens of prompts a step scores: [R, 2, N], the flat token before each and the token itself; in runs."""

    index_and_token: np.ndarray
    num_best: int
    runs: tuple[PromptRun, ...]


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
    num_tokens: int = 0  # without padding
    num_context: int = 0  # tokens of all requests up to and including the step's


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
        self._num_blocks = np.zeros(rows, np.int64)  # of the tables, already copied
        self._sampled = np.full(rows, -1, np.int64)  # the position of the token that the device last chose for the row
        self._num_scored = 0  # running requests that want their prompt scored; most steps need not look
        self._scored = [False] * rows
        self._random = random.Random(seed)

    def draw_seed(self) -> int:
        """A seed for a request that brings none: drawn once, at admission, and kept."""
        return self._random.getrandbits(64)

    def build(self, batch: ScheduledBatch) -> PackedStep:
        """Packs the batch into the smallest shape that holds it and may be used.

        It needs all batches of a scheduler, in order.
        """
        items = batch.items
        B = len(items)
        for request in batch.admitted:
            self._take_row(request)
        for request in batch.grown:
            self._copy_tables(request)
        num_tokens = batch.num_tokens
        row_B = np.fromiter([item.row for item in items], np.int64, B)
        start_B = np.fromiter([item.start for item in items], np.int64, B)
        samples_B = np.fromiter([item.samples for item in items], bool, B)
        count_B = np.ones(B, np.int64) if num_tokens == B else np.fromiter([item.count for item in items], np.int64, B)
        context_B = start_B + count_B
        prompt = self._prompt_scoring(items) if self._num_scored else None
        width = int(self._num_blocks[row_B].max())
        variant = "hidden" if prompt else "logits" if self._sampler.is_needed(row_B[samples_B]) else "greedy"
        shape = self._choose(self._buckets.shape(num_tokens, B, width, variant))
        sampling = None
        if shape.variant != "greedy":
            always = prompt is not None or variant == "greedy"
            sampling = self._sampler.build(items, row_B, context_B, samples_B, shape.num_requests, always)
        # Fresh each time: the device may still read the one before.
        packed = np.zeros((1, packed_size(shape, self._num_groups)), np.int32)
        inputs = host_views(packed[0], shape, self._num_groups)
        # The device knows what it has chosen itself, often before the host does.
        known_B = (self._sampled[row_B] != start_B) | (count_B > 1)
        write = _write_single_tokens if num_tokens == B else _write_chunks
        write(inputs, items, start_B, count_B, np.flatnonzero(known_B).tolist())
        inputs.context_len[:B] = context_B
        inputs.row[:B] = row_B
        inputs.row[B:] = self._spare_row
        inputs.samples[:B] = samples_B
        inputs.block_table[:, :B, :width] = self._tables[:, row_B, :width]
        self._sampled[row_B[samples_B]] = context_B[samples_B]
        copies = (batch.copies,) if batch.copies else ()
        return PackedStep(shape, packed, copies, sampling, prompt, num_tokens, int(context_B.sum()))

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
        return PromptScoring(np.asarray([[index, token]], np.int32), best_size(most, self._vocab_size), tuple(runs))

    def _take_row(self, request: Request) -> None:
        """Begins anew with a row that has another owner now, or the same one with other blocks."""
        row = request.row
        assert row is not None
        self._tables[:, row] = 0
        self._num_blocks[row] = 0
        self._sampled[row] = -1
        self._copy_tables(request)
        self._sampler.set_row(row, request)
        assert isinstance(request.params, SamplingParams)
        scored = request.params.prompt_logprobs is not None
        self._num_scored += scored - self._scored[row]
        self._scored[row] = scored

    def _copy_tables(self, request: Request) -> None:
        """Copies what is new in a request's tables, which are equally long."""
        row = request.row
        assert row is not None
        known, num_blocks = int(self._num_blocks[row]), len(request.block_tables[0])
        for group, table in enumerate(request.block_tables):
            self._tables[group, row, known:num_blocks] = table[known:]
        self._num_blocks[row] = num_blocks


def _write_single_tokens(
    inputs: StepInputs[np.ndarray],
    items: tuple[Scheduled, ...],
    start_B: np.ndarray,
    count_B: np.ndarray,
    known: list[int],
) -> None:
    """Writes the tokens of the decode program: one per request, padding included. `known` names items to look at."""
    B = len(items)
    inputs.token[:B] = UNKNOWN_TOKEN
    for b in known:
        inputs.token[b] = known_tokens(items[b].request, items[b].start, 1)[0]
    inputs.position[:B] = start_B
    inputs.position[B:] = -1
    inputs.request[:] = np.arange(inputs.request.shape[0])
    inputs.query_start[:] = np.arange(inputs.query_start.shape[0])


def _write_chunks(
    inputs: StepInputs[np.ndarray],
    items: tuple[Scheduled, ...],
    start_B: np.ndarray,
    count_B: np.ndarray,
    known: list[int],
) -> None:
    """Writes the tokens of the mixed program: flat, each request's behind those of the one before."""
    B = len(items)
    end_B = np.cumsum(count_B)
    first_B = end_B - count_B
    T = int(end_B[-1])
    inputs.token[:T] = UNKNOWN_TOKEN
    for b in known:
        item = items[b]
        inputs.token[first_B[b] : end_B[b]] = known_tokens(item.request, item.start, item.count)
    request_T = np.repeat(np.arange(B), count_B)
    inputs.position[:T] = np.arange(T) + (start_B - first_B)[request_T]
    inputs.position[T:] = -1
    inputs.request[:T] = request_T
    inputs.request[T:] = B - 1
    inputs.query_start[1 : B + 1] = end_B
    inputs.query_start[B + 1 :] = T


def known_tokens(request: Request, start: int, count: int) -> list[int]:
    """Tokens start..start+count of a request; UNKNOWN_TOKEN for one that only the device knows so far."""
    split = len(request.prompt_ids)
    stop = start + count
    tokens = request.prompt_ids[start : min(stop, split)] if start < split else []
    if stop > split:
        tokens = tokens + request.output_ids[max(start - split, 0) : stop - split]
    return tokens + [UNKNOWN_TOKEN] * (count - len(tokens))
