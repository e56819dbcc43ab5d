"""Charts -> a .png, with matplotlib where that is installed. Knows geometry; nothing of what the numbers mean."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from jaxllm.config.errors import InputError
from jaxllm.planning.svg import Chart, check_file

PICTURES = (".svg", ".html", ".png")


def check_picture(name: str, file: str | None, suffixes: Sequence[str] = PICTURES) -> None:
    """Refuses a file that could not be drawn into, before anything is computed; `name` is the option's.

    Raises:
        InputError: its folder does not exist, it is of another kind, or matplotlib is wanted and not there.
    """
    check_file(name, file, suffixes)
    if file is not None and is_png(file) and importlib.util.find_spec("matplotlib") is None:
        instead = "name the file .svg or .html" if ".svg" in suffixes else "write a page with html"
        raise InputError(f"{name}={file!r} needs matplotlib, which is not installed: install it, or {instead}")


def is_png(file: str) -> bool:
    """Says whether a file's name asks for a .png."""
    return Path(file).suffix.lower() == ".png"


def write_png(file: str, charts: Sequence[Chart]) -> None:
    """Draws the charts below each other."""
    height = sum([chart.height for chart in charts]) / 100
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, height), layout="constrained")
    for axes, chart in zip(figure.subplots(len(charts), squeeze=False)[:, 0], charts, strict=True):
        for curve in chart.curves:
            line = axes.plot(
                *zip(*curve.points, strict=True),
                label=curve.label,
                marker="o" if curve.tips else None,
                markersize=3,
                linestyle="-" if curve.is_joined else "none",
            )
            if curve.ringed is not None:
                ring = {"marker": "o", "markersize": 11, "fillstyle": "none", "linestyle": "none"}
                axes.plot(*[[at] for at in curve.ringed], color=line[0].get_color(), **ring)
        axes.set(title=chart.title if chart.curves else f"{chart.title}: {chart.nothing}")
        axes.set(xlabel=chart.x_label, ylabel=chart.y_label)
        if chart.is_logarithmic:
            axes.set(xscale="log", yscale="log")
        elif points := [point for curve in chart.curves for point in curve.points]:
            highest = [1.02 * max(*values, 1e-9) for values in zip(*points, strict=True)]
            axes.set(xlim=(0, highest[0]), ylim=(0, highest[1]))
        if chart.limit is not None:
            axes.axvline(chart.limit[0], color="red", linestyle="--", linewidth=1, label=chart.limit[1])
        if chart.curves:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(Path(file).expanduser(), dpi=100)
