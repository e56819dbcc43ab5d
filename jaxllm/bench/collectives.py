"""A compiled program's text -> the collectives that one run of it does. Knows HLO's notation; no model, no times."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

_KINDS = "all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|collective-broadcast"
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (.+?) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+\d*)\w*\[([\d,]*)\]")
_WHILE = re.compile(r"\bbody=%?([\w.-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|true_computation=(\S+), false_computation=(\S+))")
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
_NUM_LOOPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")

_Sort = tuple[str, tuple[str, ...], int]  # kind, axes, bytes


class Collective(NamedTuple):
    """So many collectives of one kind and size, each over all devices along these axes of the mesh.

    The size is that of the whole array which a device has before or after it: of what an all-reduce adds up, or of what
    an all-gather joins.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    number: int


def collectives(hlo: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Counts the collectives of an optimised program over a mesh, those of a loop as often as it runs.

    Of several branches the one that communicates most counts; what stays on a device does not.

    Raises:
        ValueError: the text has no entry computation, or a loop of unknown length communicates.
    """
    computations, entry = _computations(hlo)
    counted: dict[str, Counter[_Sort]] = {}

    def within(name: str) -> Counter[_Sort]:
        if name not in counted:
            total: Counter[_Sort] = Counter()
            counted[name] = total
            for line in computations.get(name, ()):
                total.update(_of_line(line, mesh_shape))
                for called, times in _calls(line):
                    inner = [within(branch) for branch in called]
                    most = max(inner, key=Counter.total)
                    if times is None and most:
                        raise ValueError(f"a loop of unknown length communicates: {line.strip():.200}")
                    total.update({each: number * (times or 0) for each, number in most.items()})
        return counted[name]

    return sorted(Collective(*each, number) for each, number in within(entry).items())


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, lines = None, []
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        else:
            lines.append(line)
    if entry is None:
        raise ValueError("this is no text of a compiled program: it has no entry computation")
    return computations, entry


def _calls(line: str) -> Iterator[tuple[list[str], int | None]]:
    """The computations that an instruction calls, one of them, and how often; None where the text does not say."""
    if loop := _WHILE.search(line):
        times = _NUM_LOOPS.search(line)
        yield [loop[1]], None if times is None else int(times[1])
    elif branches := _BRANCHES.search(line):
        names = branches[1].split(",") if branches[1] else branches.groups()[1:]
        yield [name.strip(" %,") for name in names], 1
    elif called := _CALLED.search(line):
        yield [called[1]], 1


def _of_line(line: str, mesh_shape: Mapping[str, int]) -> Iterator[_Sort]:
    found = _COLLECTIVE.search(line)
    if not found:
        return
    shapes, kind, is_start = found.groups()
    axes = _axes(line, mesh_shape)
    num_devices = math.prod(mesh_shape[axis] for axis in axes)
    if num_devices == 1:
        return
    arrays = _ARRAY.findall(shapes)
    if is_start and (kind != "all-reduce" or shapes.startswith("((")):  # what goes in, what comes out, and flags
        arrays = [(dtype, dims) for dtype, dims in arrays if dims or dtype != "u32"]
        arrays = arrays[len(arrays) // 2 :]
    yield kind, axes, sum(_num_bytes(*array) for array in arrays) * (num_devices if kind == "reduce-scatter" else 1)


def _num_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 0)
    return math.prod(map(int, filter(None, dims.split(",")))) * bits // 8


def _axes(line: str, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of the mesh along which the devices of a group differ; devices are numbered in the mesh's order."""
    if mesh := _MESH_GROUPS.search(line):
        named = re.findall(r"[\"']([^\"']+)[\"']", mesh[2])
        return tuple(axis for axis in mesh_shape if axis in named and mesh_shape[axis] > 1)
    names, sizes = tuple(mesh_shape), tuple(mesh_shape.values())
    differing = set()
    for group in _groups(line, math.prod(sizes)):
        places = np.stack(np.unravel_index(group, sizes))
        differing |= {name for name, place in zip(names, places, strict=True) if len(set(place.tolist())) > 1}
    return tuple(name for name in names if name in differing)


def _groups(line: str, num_devices: int) -> list[list[int]]:
    if iota := _IOTA_GROUPS.search(line):
        shape, dims, order = (_integers(text) for text in iota.groups(""))
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(order) if order else ids).reshape(shape).tolist()
    listed = _LISTED_GROUPS.search(line)
    groups = [_integers(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])] if listed else []
    return groups or [list(range(num_devices))]


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
