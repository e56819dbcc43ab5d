"""Curves -> a chart as SVG, charts -> one self-contained page. Knows geometry; nothing of what the numbers mean."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jaxllm.config.errors import InputError
from jaxllm.config.writable import check_writable

_LEFT, _TOP, _BOTTOM = 80, 60, 60
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
    "#7f7f7f",
    "#8c564b",
    "#9467bd",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points (x, y) joined by a line, or not. With `tips` each point is a dot that says something."""

    label: str
    points: Sequence[tuple[float, float]]
    tips: Sequence[str] = ()
    ringed: tuple[float, float] | None = None  # a point with a ring round it
    is_joined: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over two axes, which are both logarithmic or both begin at 0."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    is_logarithmic: bool = False
    limit: tuple[float, str] | None = None  # a dashed line at an x, and what it is
    nothing: str = "nothing to show"  # in the place of no curves
    width: int = 960
    height: int = 560
    legend: int = 230


def check_file(name: str, file: str | None, suffixes: Sequence[str]) -> None:
    """Refuses a file that could not be drawn into, before anything is computed; `name` is the option's.

    Raises:
        InputError: its folder does not exist, or it is of another kind.
    """
    if file is None:
        return
    path = Path(file).expanduser()
    if path.suffix.lower() not in suffixes:
        hint = " (a browser shows .svg and .html, and prints them)" if len(suffixes) > 1 else ""
        said = f"neither {' nor '.join(suffixes)}" if len(suffixes) > 1 else f"no {suffixes[0]}"
        raise InputError(f"{name}={file!r} is {said}: name it so{hint}")
    check_writable(name, file)


def page(title: str, body: str) -> str:
    """Gives an HTML page that needs no other file."""
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{head}\n<body>{body}</body></html>\n"


def draw(chart: Chart) -> str:
    """Gives the chart as SVG."""
    width, height = chart.width, chart.height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    parts = [head, f'<rect width="{width}" height="{height}" fill="white"/>']
    parts.append(_text(_LEFT, 24, escape(chart.title), size=16))
    points = [point for curve in chart.curves for point in curve.points]
    if not points:
        return "\n".join([*parts, _text(_LEFT, 80, escape(chart.nothing)), "</svg>", ""])
    make = _LogAxis if chart.is_logarithmic else _LinearAxis
    x = make([px for px, _ in points], _LEFT, width - chart.legend)
    y = make([py for _, py in points], height - _BOTTOM, _TOP)
    parts += _grid(chart, x, y)
    if chart.limit is not None and x.holds(chart.limit[0]):
        at = x.at(chart.limit[0])
        ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"'
        parts.append(f'<line {ends} stroke="red" stroke-dasharray="4"/>')
        parts.append(_text(at + 4, _TOP + 12, escape(chart.limit[1])))
    for i, curve in enumerate(chart.curves):
        parts += _curve(curve, _COLOURS[i % len(_COLOURS)], x, y)
        parts += _legend(curve.label, _COLOURS[i % len(_COLOURS)], width - chart.legend + 20, _TOP + 20 * i)
    return "\n".join([*parts, "</svg>", ""])


def stacked(charts: Sequence[Chart]) -> str:
    """Gives charts as one SVG, below each other."""
    width, height, parts = max(chart.width for chart in charts), 0, []
    for chart in charts:
        place = f'y="{height}" width="{chart.width}" height="{chart.height}"'
        parts.append(f"<svg {place}{draw(chart).removeprefix('<svg')}")
        height += chart.height
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">\n{"".join(parts)}</svg>\n'


class _LogAxis:
    """A logarithmic axis between two places of the picture."""

    def __init__(self, values: Iterable[float], start: float, end: float):
        logs = [math.log10(max(value, 1e-9)) for value in values]
        margin = max(0.05 * (max(logs) - min(logs)), 0.02)
        self.low, self.high = min(logs) - margin, max(logs) + margin
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(max(value, 1e-9)) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def holds(self, value: float) -> bool:
        return self.low <= math.log10(value) <= self.high

    def marks(self) -> list[float]:
        """1, 2 and 5 of each power of ten; equal steps where the axis is too short to hold three of them."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        found = [step * 10.0**power for power in powers for step in (1, 2, 5) if self.holds(step * 10.0**power)]
        if len(found) > 2:
            return found
        low, high = 10**self.low, 10**self.high
        step = _step(high - low)
        return [round(i * step, 12) for i in range(math.ceil(low / step), int(high / step) + 1)]


class _LinearAxis:
    """An axis from 0 to the largest value."""

    def __init__(self, values: Iterable[float], start: float, end: float):
        self.high = 1.02 * max(*values, 1e-9)
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        return self.start + value / self.high * (self.end - self.start)

    def holds(self, value: float) -> bool:
        return 0 <= value <= self.high

    def marks(self) -> list[float]:
        """Four to ten multiples of 1, 2 or 5 times a power of ten."""
        step = _step(self.high)
        return [round(i * step, 12) for i in range(int(self.high / step) + 1)]


def _step(length: float) -> float:
    """1, 2 or 5 times a power of ten, of which four to ten make a length."""
    power = 10.0 ** math.floor(math.log10(length))
    return next(part * power for part in (1, 0.5, 0.2, 0.1) if length / (part * power) >= 4)


type _Axis = _LogAxis | _LinearAxis


def _grid(chart: Chart, x: _Axis, y: _Axis) -> list[str]:
    bottom, right = chart.height - _BOTTOM, chart.width - chart.legend
    parts = []
    for value in x.marks():
        at = x.at(value)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(_text(at, bottom + 18, f"{value:,g}", anchor="middle"))
    for value in y.marks():
        at = y.at(value)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{value:,g}", anchor="end"))
    parts.append(_text((_LEFT + right) / 2, bottom + 42, escape(chart.x_label), anchor="middle"))
    parts.append(_text(_LEFT, _TOP - 10, escape(chart.y_label)))
    return parts


def _curve(curve: Curve, colour: str, x: _Axis, y: _Axis) -> list[str]:
    places = [(x.at(px), y.at(py)) for px, py in curve.points]
    parts = []
    if curve.is_joined:
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for (px, py), tip in zip(places, curve.tips, strict=False):  # without tips there are no dots
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"><title>{escape(tip)}</title></circle>')
    if curve.ringed is not None:
        px, py = x.at(curve.ringed[0]), y.at(curve.ringed[1])
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="7" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


def _legend(label: str, colour: str, x: float, y: float) -> list[str]:
    line = f'<line x1="{x}" x2="{x + 20}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="3"/>'
    return [line, _text(x + 26, y + 4, escape(label))]


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{text}</text>'
