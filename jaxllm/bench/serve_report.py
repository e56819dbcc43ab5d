"""Figures of a served run -> tables, JSON with vLLM's keys, charts. Knows what is shown; measures nothing."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bench.report import print_table
from jaxllm.bench.serve_args import ServeBenchArgs
from jaxllm.bench.serve_client import Record
from jaxllm.bench.serve_figures import ServeFigures, Times, tokens_by_second, under_way
from jaxllm.bench.serve_search import Found
from jaxllm.planning.png import is_png, write_png
from jaxllm.planning.svg import Chart, Curve, page, stacked

_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two pieces",
    "e2el": "whole request",
}
_PAGE = "font-family:sans-serif;max-width:980px;margin:24px auto"
_MOST_DOTS = 2000
_MOST_ERRORS = 3


def print_run(figures: ServeFigures, args: ServeBenchArgs) -> None:
    """Prints what one run came to."""
    f = figures
    rows = [
        ("requests", f"{f.num_completed:,} whole, {f.num_failed:,} failed, in {f.duration:.2f} s"),
        ("tokens", f"{f.num_prompt_tokens:,} of prompts, {f.num_output_tokens:,} generated"),
        ("requests/s", f"{f.request_throughput:,.2f}"),
        ("output tok/s", f"{f.output_throughput:,.1f}, {f.peak_tokens_per_second:,.0f} in the best second"),
        ("total tok/s", f"{f.total_throughput:,.1f}"),
        ("under way", f"{f.peak_concurrency:,} at most"),
    ]
    if args.goodput:
        rows.append(
            ("goodput", f"{f.goodput:,.2f} requests/s, {f.good_share:.1%} of all ({' '.join(args.goodput)} ms)")
        )
    print()
    for name, value in rows:
        print(f"{name:18}{value}")
    for error, count in sorted(f.errors.items(), key=lambda item: -item[1])[:_MOST_ERRORS]:
        print(f"{'failed':18}{count:,} x {error}")
    if not f.num_completed:
        return
    print()
    percentiles = args.percentiles()
    header = ["ms", "mean", *(f"p{percent:g}" for percent in percentiles)]
    print_table(header, [[_NAMES[name], *_row(f.times[name], percentiles)] for name in args.measures()])


def print_search(found: Found, args: ServeBenchArgs) -> None:
    """Prints every trial, and the rate that was found."""
    percentiles = args.percentiles()
    shown = [name for name in args.measures() if name in args.targets()]
    header = ["requests/s", "good", "served/s", "out tok/s", "failed"]
    header += [f"{name} p{percent:g} ms" for name in shown for percent in percentiles]
    print()
    print_table(
        header,
        [
            [
                f"{f.rate:.3f}",
                f"{f.good_share:.1%}",
                f"{f.request_throughput:.3f}",
                f"{f.output_throughput:,.1f}",
                f"{f.num_failed:,}",
                *(f"{1e3 * f.times[name].percentile(percent):,.1f}" for name in shown for percent in percentiles),
            ]
            for f in found.trials
        ],
    )
    print()
    print(verdict(found, args))


def verdict(found: Found, args: ServeBenchArgs) -> str:
    """Says in one line what a search found."""
    wanted = f"{args.goodput_share:.0%} of the requests within {' '.join(args.goodput)} ms"
    if found.rate is None:
        lowest = min(trial.rate or math.inf for trial in found.trials)
        return f"no rate down to {lowest:.3f} requests/s has {wanted}"
    if not found.is_limited:
        count = found.trials[0].num_requests
        return (
            f"{wanted}, even when all {count:,} come at once ({found.rate:.3f} requests/s served): the rate is bounded "
            "by what is served, or more requests are needed to see its limit (num_prompts)"
        )
    return f"highest rate: {found.rate:.3f} requests/s with {wanted}"


def run_json(figures: ServeFigures, args: ServeBenchArgs) -> dict[str, Any]:
    """Gives a run under the keys of vLLM's files."""
    f = figures
    said: dict[str, Any] = {
        "duration": f.duration,
        "completed": f.num_completed,
        "failed": f.num_failed,
        "total_input_tokens": f.num_prompt_tokens,
        "total_output_tokens": f.num_output_tokens,
        "request_rate": "inf" if f.rate == math.inf else f.rate,
        "request_throughput": f.request_throughput,
        "request_goodput": f.goodput if args.goodput else None,
        "good_share": f.good_share if args.goodput else None,
        "output_throughput": f.output_throughput,
        "total_token_throughput": f.total_throughput,
        "max_output_tokens_per_s": f.peak_tokens_per_second,
        "max_concurrent_requests": f.peak_concurrency,
        "lateness_p99_ms": 1e3 * f.lateness,
        "errors": dict(f.errors),
    }
    for name in args.measures():
        times = f.times[name]
        said |= {f"mean_{name}_ms": 1e3 * times.mean, f"median_{name}_ms": 1e3 * times.percentile(50)}
        said |= {f"std_{name}_ms": 1e3 * times.std}
        said |= {f"p{percent:g}_{name}_ms": 1e3 * times.percentile(percent) for percent in args.percentiles()}
    return said


def detail_json(records: Sequence[Record]) -> dict[str, Any]:
    """Gives each request's lengths and times; an error in the place of what a failed one has not."""
    return {
        "input_lens": [record.num_prompt_tokens for record in records],
        "output_lens": [record.num_output_tokens for record in records],
        "start_times": [record.sent for record in records],
        "ttfts": [record.times[0] - record.sent if record.times else None for record in records],
        "itls": [np.diff(record.times).tolist() for record in records],
        "e2els": [record.times[-1] - record.sent if record.times else None for record in records],
        "request_errors": [record.error for record in records],
    }


def run_charts(records: Sequence[Record], figures: ServeFigures) -> list[Chart]:
    """What went on over the run, and how times are spread."""
    whole = [record for record in records if record.error is None]
    moments, counts = under_way(whole)
    corners = [(at, count) for i, at in enumerate(moments) for count in (counts[i - 1] if i else 0, counts[i])]
    speeds = [(second + 0.5, tokens) for second, tokens in enumerate(tokens_by_second(whole))]
    shown = whole[:: -(-len(whole) // _MOST_DOTS) or 1]
    first = [(record.sent, 1e3 * (record.times[0] - record.sent)) for record in shown]
    tips = [f"sent at {at:.2f} s: first token after {ms:,.1f} ms" for at, ms in first]
    return [
        _chart("Requests under way", "seconds", "requests", [Curve(label="under way", points=corners)]),
        _chart("Output", "seconds", "tokens a second", [Curve(label="all requests", points=speeds)]),
        _chart(
            "Time to first token, by when a request was sent",
            "seconds",
            "ms",
            [Curve(label="a request", points=first, tips=tips, is_joined=False)],
        ),
        _chart("First token", "ms", "% took at most", [_spread("TTFT", figures.times["ttft"])]),
        _chart(
            "Later tokens",
            "ms",
            "% took at most",
            [_spread("TPOT of a request", figures.times["tpot"]), _spread("between pieces", figures.times["itl"])],
        ),
        _chart("Whole requests", "ms", "% took at most", [_spread("E2E", figures.times["e2el"])]),
    ]


def search_charts(found: Found, args: ServeBenchArgs) -> list[Chart]:
    """What a rate does to the targets."""
    trials = sorted(found.trials, key=lambda trial: trial.rate or 0.0)
    good = [(trial.rate or 0.0, 100 * trial.good_share) for trial in trials]
    tips = [f"{rate:.3f} requests/s: {share:.1f}%" for rate, share in good]
    charts = [
        _chart(
            "Requests that meet all targets", "requests/s offered", "%", [Curve(label="good", points=good, tips=tips)]
        )
    ]
    highest = args.percentiles()[-1]
    for name in args.targets():
        points = [(trial.rate or 0.0, 1e3 * trial.times[name].percentile(highest)) for trial in trials]
        curve = Curve(
            label=f"p{highest:g}", points=points, tips=[f"{x:.3f} requests/s: {y:,.1f} ms" for x, y in points]
        )
        charts.append(_chart(_NAMES[name].capitalize(), "requests/s offered", "ms", [curve]))
    return charts


def write_charts(file: str, title: str, charts: Sequence[Chart]) -> None:
    """Writes the charts below each other; an .html file is a page with them."""
    if is_png(file):
        write_png(file, charts)
        return
    path, svg = Path(file).expanduser(), stacked(charts)
    shown = f'<div style="{_PAGE}"><h1>{escape(title)}</h1>{svg}</div>'
    path.write_text(page(title, shown) if path.suffix.lower() == ".html" else svg)


def _row(times: Times, percentiles: Sequence[float]) -> list[str]:
    return [f"{1e3 * value:,.2f}" for value in (times.mean, *(times.percentile(percent) for percent in percentiles))]


def _chart(title: str, x_label: str, y_label: str, curves: Sequence[Curve]) -> Chart:
    shown = [curve for curve in curves if curve.points]
    return Chart(
        title=title, x_label=x_label, y_label=y_label, curves=shown, height=320, nothing="no request was whole"
    )


def _spread(label: str, times: Times) -> Curve:
    if not len(times.values):
        return Curve(label=label, points=[])
    values = np.quantile(times.values, np.linspace(0, 1, min(len(times.values), 201)))
    last = max(len(values) - 1, 1)
    return Curve(label=label, points=[(1e3 * float(value), 100 * i / last) for i, value in enumerate(values)])


def facts_json(facts: Mapping[str, Any], args: ServeBenchArgs) -> dict[str, Any]:
    """Gives what a file of results begins with, under vLLM's keys where it has them."""
    return {
        **facts,
        "backend": args.backend,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "goodput_ms": {name: 1e3 * seconds for name, seconds in args.targets().items()},
    }
