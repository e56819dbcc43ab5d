"""A plan -> a picture of throughput against latency, a curve for each shape. Knows what is shown; draws no line itself.

Each curve's points are batches; the circle is the batch that was chosen. Both axes are logarithmic.
"""

from pathlib import Path

from jaxllm.mesh.planner import Candidate, Plan
from jaxllm.planning.png import check_picture, is_png, write_png
from jaxllm.planning.svg import Chart, Curve, draw, page


def check_plot(file: str | None) -> None:
    """Refuses a file that could not be drawn into, before anything is planned.

    Raises:
        InputError: its folder does not exist, it is of another kind, or matplotlib is wanted and not there.
    """
    check_picture("plot", file)


def write_plot(plan: Plan, file: str) -> None:
    """Draws the plan; an .html file is a page with nothing but the picture."""
    if is_png(file):
        write_png(file, [chart_of(plan)])
        return
    path, svg = Path(file).expanduser(), draw(chart_of(plan))
    is_page = path.suffix.lower() == ".html"
    path.write_text(page(f"{plan.shape.name} on {plan.num_devices} x {plan.device.name}", svg) if is_page else svg)


def chart_of(plan: Plan) -> Chart:
    """Says what the picture shows."""
    tpot = plan.traffic.tpot
    return Chart(
        title=f"{plan.shape.name} on {plan.num_devices} x {plan.device.name}: predicted",
        x_label="time per output token, ms",
        y_label="output tokens a second, all devices",
        curves=[_curve(candidate) for candidate in plan.candidates if candidate.curve],
        is_logarithmic=True,
        limit=None if tpot is None else (tpot * 1e3, "TPOT target"),
        nothing="no shape fits",
    )


def _curve(candidate: Candidate) -> Curve:
    chosen = candidate.operating
    return Curve(
        label=str(candidate.mesh),
        points=[(p.tpot * 1e3, p.tokens_per_second) for p in candidate.curve],
        tips=[
            f"{candidate.mesh}, batch {p.batch}: {p.tokens_per_second:,.0f} tok/s, TPOT {p.tpot * 1e3:.1f} ms"
            for p in candidate.curve
        ],
        ringed=None if chosen is None else (chosen.tpot * 1e3, chosen.tokens_per_second),
    )
