import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxllm.planning.png import write_png
from jaxllm.planning.svg import Chart, Curve, draw, stacked


def chart(low: float, high: float, is_logarithmic: bool) -> Chart:
    curve = Curve(label="a & b", points=[(low, low), (high, high)], tips=["first", "last"], ringed=(high, high))
    return Chart(title="t", x_label="x", y_label="y", curves=[curve], is_logarithmic=is_logarithmic, limit=(high, "l"))


@pytest.mark.parametrize("is_logarithmic", [False, True])
@pytest.mark.parametrize("span", [(5.6, 8.7), (0.0011, 0.0012), (20, 900), (1, 1e6), (51_000, 53_000)])
def test_both_axes_have_at_least_three_marks_however_short_they_are(span: tuple[float, float], is_logarithmic: bool):
    drawn = draw(chart(*span, is_logarithmic))
    for anchor in ("middle", "end"):
        marks = re.findall(rf'text-anchor="{anchor}" font-size="12">([\d.,e+-]+)<', drawn)
        assert 3 <= len(marks) == len(set(marks)) <= 20


def test_charts_below_each_other_are_one_picture():
    root = ElementTree.fromstring(stacked([chart(1, 2, True), chart(3, 4, False)]))
    assert root.attrib["viewBox"] == "0 0 960 1120"
    assert [(inner.attrib["y"], inner.attrib["height"]) for inner in root] == [("0", "560"), ("560", "560")]


def test_the_same_charts_as_png(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write_png(str(tmp_path / "run.png"), [chart(1, 2, True), chart(3, 4, False)])
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
