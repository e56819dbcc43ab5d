"""A plan -> a picture of throughput against latency, a curve for each shape. Knows SVG; no plotting library.

Each curve's points are batches; the circle is the batch that was chosen. Both axes are logarithmic.
"""

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path

from jaxllm.config.errors import InputError
from jaxllm.mesh.planner import Candidate, Plan

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEGEND = 960, 560, 80, 60, 60, 230
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
_SUFFIXES = (".svg", ".html")


def check_plot(file: str | None) -> None:
    """Refuses a file that could not be drawn into, before anything is planned.

    Raises:
        InputError: its folder does not exist, or it is of another kind.
    """
    if file is None:
        return
    path = Path(file).expanduser()
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"plot={file!r} is neither .svg nor .html: name it so (a browser shows both and prints them)")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"plot={file!r} cannot be written: there is no folder {path.parent}")


def write_plot(plan: Plan, file: str) -> None:
    """Draws the plan; an .html file is a page with nothing but the picture."""
    path, svg = Path(file).expanduser(), draw(plan)
    if path.suffix.lower() == ".html":
        title = escape(f"{plan.shape.name} on {plan.num_devices} x {plan.device.name}")
        head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>'
        svg = f"{head}\n<body>{svg}</body></html>\n"
    path.write_text(svg)


def draw(plan: Plan) -> str:
    """Gives the picture as SVG."""
    shown = [c for c in plan.candidates if c.curve]
    points = [p for c in shown for p in c.curve]
    title = escape(f"{plan.shape.name} on {plan.num_devices} x {plan.device.name}: predicted")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    parts = [head, f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>', _text(_LEFT, 24, title, size=16)]
    if not points:
        return "\n".join([*parts, _text(_LEFT, 80, "no shape fits"), "</svg>", ""])
    x = _Axis([p.tpot * 1e3 for p in points], _LEFT, _WIDTH - _LEGEND)
    y = _Axis([p.tokens_per_second for p in points], _HEIGHT - _BOTTOM, _TOP)
    parts += _grid(x, y)
    if plan.traffic.tpot is not None and x.holds(plan.traffic.tpot * 1e3):
        at = x.at(plan.traffic.tpot * 1e3)
        ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"'
        parts.append(f'<line {ends} stroke="red" stroke-dasharray="4"/>')
        parts.append(_text(at + 4, _TOP + 12, "TPOT target"))
    for i, candidate in enumerate(shown):
        parts += _curve(candidate, _COLOURS[i % len(_COLOURS)], x, y, _TOP + 20 * i)
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
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
        """1, 2 and 5 of each power of ten."""
        powers = range(math.floor(self.low), math.ceil(self.high) + 1)
        return [step * 10.0**power for power in powers for step in (1, 2, 5) if self.holds(step * 10.0**power)]


def _grid(x: _Axis, y: _Axis) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _LEGEND
    parts = []
    for value in x.marks():
        at = x.at(value)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(_text(at, bottom + 18, f"{value:g}", anchor="middle"))
    for value in y.marks():
        at = y.at(value)
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, at + 4, f"{value:,g}", anchor="end"))
    parts.append(_text((_LEFT + right) / 2, bottom + 42, "time per output token, ms", anchor="middle"))
    parts.append(_text(_LEFT, _TOP - 10, "output tokens a second, all devices"))
    return parts


def _curve(candidate: Candidate, colour: str, x: _Axis, y: _Axis, legend: float) -> list[str]:
    places = [(x.at(p.tpot * 1e3), y.at(p.tokens_per_second), p) for p in candidate.curve]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in places)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for px, py, p in places:
        label = f"{candidate.mesh}, batch {p.batch}: {p.tokens_per_second:,.0f} tok/s, TPOT {p.tpot * 1e3:.1f} ms"
        parts.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"><title>{escape(label)}</title></circle>'
        )
    if candidate.operating is not None:
        px, py = x.at(candidate.operating.tpot * 1e3), y.at(candidate.operating.tokens_per_second)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="7" fill="none" stroke="{colour}" stroke-width="2"/>')
    at = _WIDTH - _LEGEND + 20
    parts.append(f'<line x1="{at}" x2="{at + 20}" y1="{legend}" y2="{legend}" stroke="{colour}" stroke-width="3"/>')
    parts.append(_text(at + 26, legend + 4, str(candidate.mesh)))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{text}</text>'
