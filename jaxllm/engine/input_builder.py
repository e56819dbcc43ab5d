"""ScheduledBatch -> one packed array. Knows requests' tokens, tables and sampling numbers; no device, no scheduling.

Keeps a host copy of every row's block tables and sampling numbers, so that a step copies rows instead of walking lists.
"""

import random
from typing import NamedTuple

import numpy as np

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.buckets import Buckets, StepShape, Variant
from jaxllm.engine.step_inputs import UNKNOWN_TOKEN, StepInputs, host_views, packed_size
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduled, ScheduledBatch


class PackedStep(NamedTuple):
    """What the runner takes: the compiled shape, its packed inputs, and blocks to copy (from, to) before the step."""

    shape: StepShape
    packed: np.ndarray
    copies: tuple[tuple[int, int], ...] = ()


class InputBuilder:
    """Builds the inputs of each step for rows 0..max_num_seqs-1; row max_num_seqs is the spare one of padding."""

    def __init__(self, buckets: Buckets, max_num_seqs: int, max_blocks: int, num_groups: int, seed: int = 0):
        self._buckets = buckets
        self._num_groups = num_groups
        rows = max_num_seqs + 1
        self._spare_row = max_num_seqs
        self._tables = np.zeros((num_groups, rows, max_blocks), np.int32)
        self._owner: list[Request | None] = [None] * rows
        self._num_blocks = np.zeros((num_groups, rows), np.int64)  # of the tables, already copied
        self._num_preemptions = [0] * rows
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int32)
        self._top_p = np.ones(rows, np.float32)
        self._seed = np.zeros((rows, 2), np.uint32)
        self._variant: list[Variant] = ["greedy"] * rows
        self._random = random.Random(seed)

    def draw_seed(self) -> int:
        """A seed for a request that brings none: drawn once, at admission, and kept."""
        return self._random.getrandbits(64)

    def forget_rows(self) -> None:
        """Copies everything anew at the next step: the tables were given back behind its back."""
        self._owner = [None] * len(self._owner)

    def build(self, batch: ScheduledBatch) -> PackedStep:
        """Packs the batch into the smallest shape that holds it."""
        items = batch.items
        for item in items:
            self._refresh_row(item)
        rows = np.fromiter((item.row for item in items), np.int64, len(items))
        shape = self._shape(items, rows)
        # Fresh each time: the device may still read the one before.
        packed = np.zeros(packed_size(shape, self._num_groups), np.int32)
        inputs = host_views(packed, shape, self._num_groups)
        self._write_tokens(inputs, items)
        B, M = len(items), shape.table_width
        inputs.row[:B] = rows
        inputs.row[B:] = self._spare_row
        inputs.samples[:B] = [item.samples for item in items]
        inputs.block_table[:, :B] = self._tables[:, rows, :M]
        inputs.temperature[:B] = self._temperature[rows]
        inputs.top_k[:B] = self._top_k[rows]
        inputs.top_p[:B] = self._top_p[rows]
        inputs.seed[:B] = self._seed[rows]
        return PackedStep(shape, packed, batch.copies)

    def _shape(self, items: tuple[Scheduled, ...], rows: np.ndarray) -> StepShape:
        num_tokens = sum(item.count for item in items)
        variants = {self._variant[item.row] for item in items if item.samples}
        variant: Variant = "full" if "full" in variants else "sampled" if "sampled" in variants else "greedy"
        return self._buckets.shape(num_tokens, len(items), int(self._num_blocks[:, rows].max()), variant)

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
            self._set_sampling(row, request.params)
        for group, table in enumerate(request.block_tables):
            known = self._num_blocks[group, row]
            if len(table) > known:
                self._tables[group, row, known : len(table)] = table[known:]
                self._num_blocks[group, row] = len(table)

    def _set_sampling(self, row: int, params: object) -> None:
        assert isinstance(params, SamplingParams)
        seed = (params.seed or 0) % 2**64
        self._temperature[row] = params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._seed[row] = (seed & 0xFFFFFFFF, seed >> 32)
        filtered = params.top_k > 0 or params.top_p < 1.0
        self._variant[row] = "greedy" if params.greedy else "full" if filtered else "sampled"


def known_tokens(request: Request, start: int, count: int) -> list[int]:
    """Tokens start..start+count of a request; UNKNOWN_TOKEN for one that only the device knows so far."""
    split = len(request.prompt_ids)
    stop = start + count
    tokens = request.prompt_ids[start : min(stop, split)] if start < split else []
    if stop > split:
        tokens = tokens + request.output_ids[max(start - split, 0) : stop - split]
    return tokens + [UNKNOWN_TOKEN] * (count - len(tokens))
