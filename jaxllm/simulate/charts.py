"""Figures -> charts, a page of them, a picture for a document. Knows what is shown; planning/svg.py draws."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from jaxllm.planning.png import check_picture
from jaxllm.planning.svg import Chart, Curve, check_file, draw, page
from jaxllm.simulate.figures import Figures, Spread
from jaxllm.simulate.sweep import Trial

_STYLE = "font-family:sans-serif;max-width:980px;margin:24px auto"
_CELL = "padding:2px 12px 2px 0;text-align:left;white-space:nowrap"


def check_files(html: str | None, png: str | None) -> None:
    """Refuses what could not be written, before anything is simulated.

    Raises:
        InputError: a file's name or folder is wrong, or matplotlib is wanted and not there.
    """
    check_file("html", html, (".html",))
    check_picture("png", png, (".png",))


def charts_of(figures: Figures) -> list[Chart]:
    """What went on over time, and how times are spread."""
    course = figures.course

    def over_time(title: str, y_label: str, series: Iterable[tuple[str, Sequence[float]]]) -> Chart:
        curves = [Curve(label=label, points=list(zip(course.times, values, strict=True))) for label, values in series]
        return Chart(title=title, x_label="seconds", y_label=y_label, curves=curves, height=320)

    by_rank = [f"data rank {rank}" for rank in range(len(figures.ranks))]
    usage = [[100 * share for share in shares] for shares in course.kv_usage]
    return [
        over_time("Output", "tokens a second", [("all ranks", course.tokens_per_second)]),
        over_time("Requests", "requests", [("running", course.running), ("waiting", course.waiting)]),
        over_time("KV cache", "% of the pool", zip(by_rank, usage, strict=True)),
        over_time("Tokens in a step", "tokens", zip(by_rank, course.rank_tokens, strict=True)),
        _spread_chart("Time to first token", [("TTFT", figures.ttft)]),
        _spread_chart("Time per token", [("TPOT of a request", figures.tpot), ("between two tokens", figures.itl)]),
    ]


def sweep_chart(trials: Sequence[Trial], title: str) -> Chart:
    """Throughput against time per token: a curve for each shape and budget, and the front."""
    ran = [(t, (t.figures.tpot.mean * 1e3, t.figures.tokens_per_second)) for t in trials if t.figures is not None]
    kinds = dict.fromkeys((t.mesh, t.max_num_batched_tokens) for t, _ in ran)
    curves = []
    for mesh, budget in kinds:
        own = [(t, point) for t, point in ran if (t.mesh, t.max_num_batched_tokens) == (mesh, budget)]
        tips = [f"{t}: {y:,.0f} tok/s, TPOT {x:.1f} ms" for t, (x, y) in own]
        curves.append(Curve(label=f"{mesh}, {budget} tokens", points=[point for _, point in own], tips=tips))
    front = sorted(point for t, point in ran if t.is_on_front)
    curves.append(Curve(label="Pareto front", points=front))
    return Chart(
        title=title,
        x_label="mean time per output token, ms",
        y_label="output tokens a second, all devices",
        curves=curves,
        is_logarithmic=True,
        legend=270,
    )


def write_page(file: str, title: str, facts: Iterable[tuple[str, str]], charts: Sequence[Chart], tables: str) -> None:
    """Writes one page that needs no other file: facts, tables, charts."""
    told = "".join(f'<tr><th style="{_CELL}">{escape(a)}</th><td>{escape(b)}</td></tr>' for a, b in facts)
    drawn = "".join(draw(chart) for chart in charts)
    body = f'<div style="{_STYLE}"><h1>{escape(title)}</h1><table>{told}</table>{tables}{drawn}</div>'
    Path(file).expanduser().write_text(page(title, body))


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Gives a table for the page."""
    head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f'<table style="margin:16px 0;font-size:13px"><tr>{head}</tr>{body}</table>'


def _spread_chart(title: str, spreads: Sequence[tuple[str, Spread]]) -> Chart:
    curves = []
    for label, spread in spreads:
        last = max(len(spread.ascending) - 1, 1)
        points = [(1e3 * value, 100 * i / last) for i, value in enumerate(spread.ascending)]
        curves.append(Curve(label=label, points=points))
    return Chart(title=title, x_label="ms", y_label="% took at most", curves=curves, height=320)
