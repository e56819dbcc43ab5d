"""What the host knows of a data rank's rows, and its part of a step's inputs. Knows no other rank and no shapes.

Keeps a host copy of every row's block tables, so that a step copies rows instead of walking lists.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.rank_items import RankItems, SinglesColumns
from jaxllm.engine.sampler_rows import SamplerRows
from jaxllm.engine.step_inputs import UNKNOWN_TOKEN, StepInputs
from jaxllm.scheduler.batch import RankBatch
from jaxllm.scheduler.request import Request


class RankRows:
    """Rows 0..max_num_seqs-1 of a data rank; row max_num_seqs is the spare one of padding."""

    def __init__(self, max_num_seqs: int, max_blocks: int, num_groups: int, sampler: SamplerRows):
        rows = max_num_seqs + 1
        self._sampler = sampler
        self._spare_row = max_num_seqs
        self._tables = np.zeros((num_groups, rows, max_blocks), np.int32)
        self._num_blocks = np.zeros(rows, np.int64)  # of the tables, already copied
        self._sampled = np.full(rows, -1, np.int64)  # the position of the token that the device last chose for the row
        self._singles = SinglesColumns()  # of the step taken last
        self._tick = 0  # of that step; singles have been sampled up to it, which `_sampled` learns when they change
        self.num_scored = 0  # running requests that want their prompt scored; most steps need not look
        self.scored = [False] * rows

    def take(self, part: RankBatch) -> None:
        """Takes over new owners of rows and tables that grew."""
        if part.singles is not self._singles.singles:
            self._sampled[self._singles.row] = self._singles.offset + (self._tick + 1)
            self._singles = SinglesColumns(part.singles)
        self._tick = part.tick
        for request in part.admitted:
            self._take_row(request)
        if part.grown:
            self._copy_grown(part.grown)

    def items(self, part: RankBatch) -> RankItems:
        """Gives the step's items as columns."""
        return self._singles.items(part)

    def table_width(self, own: RankItems) -> int:
        """Gives the length of the longest table of the items."""
        return int(self._num_blocks[own.row].max()) if own.num_requests else 1

    def write(self, inputs: StepInputs[np.ndarray], own: RankItems, width: int, is_decode: bool) -> None:
        """Fills the rank's fields of a step, which are zeros; what the items leave open becomes padding.

        `width` is that of the longest table of any rank.
        """
        B, S = own.num_requests, own.num_singles
        known: list[int] = []
        if S < B:  # the device knows what it has chosen itself, often before the host does; that is so for all singles
            known_B = (self._sampled[own.row[S:]] != own.start[S:]) | (own.count[S:] > 1)
            known = (np.flatnonzero(known_B) + S).tolist()
            self._sampled[own.sampling_row] = own.end[own.samples]
        write = _write_single_tokens if is_decode else _write_chunks
        write(inputs, own, known)
        inputs.context_len[:B] = own.end
        inputs.row[:B] = own.row
        inputs.row[B:] = self._spare_row
        inputs.samples[:B] = own.samples
        inputs.block_table[:, :B, :width] = self._tables[:, own.row, :width]

    def advance(self, block_table: np.ndarray, part: RankBatch) -> int:
        """Brings the tables [G, B, M] of a step's singles, as they were a step before, up to this one.

        Gives the length of the longest one that grew; too long a one is not written.
        """
        if not part.grown:
            return 0
        rows = [request.row or 0 for request in part.grown]
        width = max([len(request.block_tables[0]) for request in part.grown])
        if width <= block_table.shape[2]:
            block_table[:, self._singles.places(rows), :width] = self._tables[:, rows, :width]
        return width

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
        self.num_scored += scored - self.scored[row]
        self.scored[row] = scored

    def _copy_grown(self, requests: Sequence[Request]) -> None:
        """Copies what is new in several requests' tables: of most the last block."""
        if len(requests) < 4:
            for request in requests:
                self._copy_tables(request)
            return
        rows = np.array([request.row for request in requests])
        length = np.array([len(request.block_tables[0]) for request in requests])
        longer = length > self._num_blocks[rows] + 1
        if longer.any():
            for place in np.flatnonzero(longer).tolist():
                self._copy_tables(requests[place])
        for group in range(len(self._tables)):
            self._tables[group, rows, length - 1] = [request.block_tables[group][-1] for request in requests]
        self._num_blocks[rows] = length

    def _copy_tables(self, request: Request) -> None:
        """Copies what is new in a request's tables, which are equally long."""
        row = request.row
        assert row is not None
        known, num_blocks = int(self._num_blocks[row]), len(request.block_tables[0])
        for group, table in enumerate(request.block_tables):
            self._tables[group, row, known:num_blocks] = table[known:]
        self._num_blocks[row] = num_blocks


def _write_single_tokens(inputs: StepInputs[np.ndarray], own: RankItems, known: list[int]) -> None:
    """Writes the tokens of the decode program: one per request, padding included. `known` names items to look at."""
    others, B, S = own.part.others, own.num_requests, own.num_singles
    inputs.token[:B] = UNKNOWN_TOKEN
    for b in known:
        inputs.token[b] = known_tokens(others[b - S].request, others[b - S].start, 1)[0]
    inputs.position[:B] = own.start
    inputs.position[B:] = -1
    inputs.request[:] = np.arange(inputs.request.shape[0])
    inputs.query_start[:] = np.arange(inputs.query_start.shape[0])


def _write_chunks(inputs: StepInputs[np.ndarray], own: RankItems, known: list[int]) -> None:
    """Writes the tokens of the mixed program: flat, each request's behind those of the one before."""
    others, B, S, T, count_B = own.part.others, own.num_requests, own.num_singles, own.num_tokens, own.count
    end_B = np.cumsum(count_B)
    first_B = end_B - count_B
    inputs.token[:T] = UNKNOWN_TOKEN
    for b in known:
        item = others[b - S]
        inputs.token[first_B[b] : end_B[b]] = known_tokens(item.request, item.start, item.count)
    request_T = np.repeat(np.arange(B), count_B)
    inputs.position[:T] = np.arange(T) + (own.start - first_B)[request_T]
    inputs.position[T:] = -1
    inputs.request[:T] = request_T
    inputs.request[T:] = max(B - 1, 0)  # a rank without requests has padding only
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
