"""Which parts of which checkpoint tensors make up one shard of a parameter. Knows pieces, axes and head layouts.

Reads nothing and knows no devices: a shard is a range of each axis.

A parameter is seen as a table, whose *lanes* are what the rows of a checkpoint tensor become: the outputs of a
projection, stored behind its inputs; of anything else the first axis. A place of a split parameter has a number in the
unsplit one, head by head (models/heads.py), or is EMPTY. From these numbers and the pieces follow the copies: runs of
rows that lie side by side both in the checkpoint and in the shard.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from jaxllm.models.config import ModelConfig
from jaxllm.models.family import Piece

EMPTY = -1
Axes = tuple[str | None, ...]
Index = tuple[tuple[int, int], ...]  # of a shard: first place and the one behind the last, on each axis


class Run(NamedTuple):
    """Places start:stop of a source, that go to places from `place` on."""

    start: int
    stop: int
    place: int

    @property
    def end(self) -> int:
        """The place behind the last."""
        return self.place + self.stop - self.start


class Copy(NamedTuple):
    """Rows of a piece's tensor and the lanes that they go to."""

    piece: Piece
    run: Run


class ShardPlan(NamedTuple):
    """One layer of one shard: a table of lanes and columns, and what is copied where. The rest of it is zeros.

    `columns` are the columns of each tensor that the shard holds, and where. `num_inputs` axes stand before the lanes;
    None where the lanes come first.
    """

    num_inputs: int | None
    num_lanes: int
    num_columns: int
    copies: tuple[Copy, ...]
    columns: tuple[Run, ...]

    def edges(self) -> list[int]:
        """Lanes at which copies begin or end, and both ends of the table."""
        ends = {lane for copy in self.copies for lane in (copy.run.place, copy.run.end)}
        return sorted(ends | {0, self.num_lanes})

    @property
    def size(self) -> int:
        """Values that are read."""
        rows = sum(copy.run.stop - copy.run.start for copy in self.copies)
        return rows * sum(run.stop - run.start for run in self.columns)


def plan_shard(
    pieces: tuple[Piece, ...], shape: tuple[int, ...], axes: Axes, index: Index, cfg: ModelConfig
) -> ShardPlan:
    """Gives the plan of the shard at `index` of one layer of a parameter, whose configuration is split or not."""
    linear, first = pieces[0].linear, _first_output(pieces, shape, axes, cfg)
    front, num_front = numbers(axes[:first], shape[:first], cfg)
    back, num_back = numbers(axes[first:], shape[first:], cfg)
    parts = [slice(*bounds) for bounds in index]
    front, back = front[tuple(parts[:first])].ravel(), back[tuple(parts[first:])].ravel()
    lanes, columns, num_lanes = (back, front, num_back) if linear else (front, back, num_front)
    owner, row = _sources(pieces, num_lanes)
    source = np.where(lanes == EMPTY, EMPTY, owner[lanes])
    rows = np.where(source == EMPTY, EMPTY, row[lanes])
    copies = [Copy(pieces[source[run.place]], run) for run in _runs(rows, source)]
    num_inputs = first if linear else None
    return ShardPlan(num_inputs, len(lanes), len(columns), tuple(copies), tuple(_runs(columns, 0 * columns)))


def numbers(axes: Axes, shape: tuple[int, ...], cfg: ModelConfig) -> tuple[np.ndarray, int]:
    """Gives the number that each place on these axes has in the unsplit parameter, or EMPTY; and how many there are."""
    found, total, axis = np.zeros((), np.int64), 1, 0
    while axis < len(axes):
        width = 2 if axes[axis] == "kv_heads" and axes[axis + 1 : axis + 2] == (None,) else 1
        own, count = _axis_numbers(axes[axis], shape[axis : axis + width], cfg)
        outer = found.reshape(found.shape + (1,) * own.ndim)
        found = np.where((outer == EMPTY) | (own == EMPTY), EMPTY, outer * count + own)
        total, axis = total * count, axis + width
    return found, total


def axis_numbers(axes: Axes, shape: tuple[int, ...], cfg: ModelConfig) -> tuple[list[np.ndarray | None], np.ndarray]:
    """Gives the numbers axis by axis, to be broadcast (None: they are in order), and which places are not empty."""
    by_axis: list[np.ndarray | None] = [None] * len(axes)
    filled = np.ones((1,) * len(axes), np.bool_)
    for axis, name in enumerate(axes):
        pair = name == "kv_heads" and axes[axis + 1 : axis + 2] == (None,)
        own, _ = _axis_numbers(name, shape[axis : axis + 1 + pair], cfg)
        if np.array_equal(own.ravel(), np.arange(own.size)):
            continue
        around = (1,) * axis, (1,) * (len(axes) - axis - own.ndim)
        own = own.reshape(around[0] + own.shape + around[1])
        filled = filled & (own != EMPTY)
        if pair and cfg.heads is not None:
            members = cfg.heads.num_q_heads // cfg.heads.num_kv_heads + 2
            by_axis[axis], by_axis[axis + 1] = own // members, own % members
        else:
            by_axis[axis] = own
    return by_axis, filled


def _axis_numbers(name: str | None, shape: tuple[int, ...], cfg: ModelConfig) -> tuple[np.ndarray, int]:
    """One axis, or that of the KV heads together with the one behind it: query heads, key, value."""
    layout, in_order = cfg.heads, np.arange(math.prod(shape)).reshape(shape)
    if name == "vocab":
        return np.where(in_order < cfg.vocab_size, in_order, EMPTY), cfg.vocab_size
    if layout is None or name not in ("q_heads", "kv_heads"):
        return in_order, in_order.size
    each = layout.num_q_heads // layout.num_kv_heads
    slots = range(layout.num_slots)
    places = [[*layout.q_heads(slot), *[EMPTY] * layout.group][: layout.group] for slot in slots]
    heads = np.asarray([EMPTY if layout.kv_head(slot) is None else layout.kv_head(slot) for slot in slots])
    if name == "q_heads":
        return np.asarray(places).ravel(), layout.num_q_heads
    if len(shape) == 1:
        return heads, layout.num_kv_heads
    members = np.asarray([[n % each if n != EMPTY else EMPTY for n in slot] + [each, each + 1] for slot in places])
    found = np.where((heads[:, None] == EMPTY) | (members == EMPTY), EMPTY, heads[:, None] * (each + 2) + members)
    return found, layout.num_kv_heads * (each + 2)


def _first_output(pieces: tuple[Piece, ...], shape: tuple[int, ...], axes: Axes, cfg: ModelConfig) -> int:
    """How many axes stand before the outputs of a projection, or are the rows of anything else."""
    if not pieces[0].linear:
        return 1
    num_inputs = math.prod(pieces[0].shape[1:])
    for first in range(len(axes)):
        if numbers(axes[:first], shape[:first], cfg)[1] == num_inputs:
            return first
    raise ValueError(f"no first axes of {axes} {shape} have the {num_inputs} columns of {pieces[0].name}")


def _sources(pieces: tuple[Piece, ...], num_lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Which piece fills each lane of the unsplit table, and with which row of its tensor."""
    owner, row = np.full(num_lanes, EMPTY), np.full(num_lanes, EMPTY)
    for number, piece in enumerate(pieces):
        rows = piece.first_row + np.arange(piece.num_rows).reshape(piece.units, -1)
        for table, values in ((owner, number), (row, rows)):
            by_unit = table.reshape(piece.units, -1)
            by_unit[:, piece.column : piece.column + rows.shape[1]] = values
    return owner, row


def _runs(source: np.ndarray, kind: np.ndarray) -> list[Run]:
    """Stretches over which the source counts on and the kind stays; what is EMPTY is in none."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(kind) != 0)) + 1
    bounds = [0, *breaks.tolist(), len(source)]
    return [
        Run(int(source[first]), int(source[first]) + stop - first, first)
        for first, stop in itertools.pairwise(bounds)
        if source[first] != EMPTY
    ]
