import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from jaxllm.cli import main
from jaxllm.mesh.planner import MeshShape
from jaxllm.simulate.figures import Figures, Spread
from jaxllm.simulate.sweep import Trial, mark_front

SMALL = ("smollm2", "--devices", "2xH200", "--input-len", "100", "--output-len", "20", "--num-requests", "60")


def called(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *map(str, arguments)])
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def pictures(page) -> list[ElementTree.Element]:
    text = page.read_text()
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # it needs no other file
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def curves(picture: ElementTree.Element) -> list[ElementTree.Element]:
    return [node for node in picture.iter() if node.tag.endswith("polyline")]


def test_a_run_is_printed_and_written_as_json_and_as_a_page(capsys, tmp_path):
    files = tmp_path / "run.json", tmp_path / "run.html"
    code, out, _ = called(capsys, *SMALL, "--request-rate", 100, "--json", files[0], "--html", files[1])
    assert code == 0
    assert "2 x H200, data=2 x tensor=1" in out
    assert "60 requests, 6,000 tokens in, 1,200 out" in out
    said = json.loads(files[0].read_text())
    assert said["num_output_tokens"] == 1200
    assert said["output_tokens_per_second"] == pytest.approx(1200 / said["seconds"])
    assert len(said["ranks"]) == len(said["course"]["kv_usage"]) == 2
    assert said["ttft"]["p50"] <= said["ttft"]["p99"]
    assert [len(curves(picture)) for picture in pictures(files[1])] == [1, 2, 2, 2, 1, 2]


def test_a_sweep_marks_the_front(capsys, tmp_path):
    files = tmp_path / "sweep.json", tmp_path / "sweep.html"
    options = ("--sweep", "--sweep-num-seqs", "4", "16", "--sweep-token-budgets", "64,256")
    code, out, _ = called(capsys, *SMALL, *options, "--json", files[0], "--html", files[1])
    assert code == 0
    assert "Pareto front" in out
    settings = json.loads(files[0].read_text())["settings"]
    assert len(settings) == 2 * 2 * 2
    front = [s for s in settings if s["is_on_front"]]
    assert max(settings, key=lambda s: s["output_tokens_per_second"]) in front
    assert min(settings, key=lambda s: s["tpot"]["mean"]) in front
    (picture,) = pictures(files[1])
    assert len(curves(picture)) == 2 * 2 + 1


def trial(speed: int, tpot: float) -> Trial:
    figures = object.__new__(Figures)  # of which nothing else is looked at
    for name, value in {"num_output_tokens": speed, "seconds": 1.0, "tpot": Spread(tpot, tpot, tpot, tpot)}.items():
        object.__setattr__(figures, name, value)
    return Trial(mesh=MeshShape(1, 1), max_num_seqs=1, max_num_batched_tokens=16, figures=figures)


def test_nothing_on_the_front_is_beaten():
    marked = mark_front([trial(10, 5), trial(10, 6), trial(9, 4), trial(8, 4.5), trial(10, 5)])
    assert [each.is_on_front for each in marked] == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smollm2"], "devices is missing"),
        ([*SMALL, "--workload", "W2"], "--input-len=100 is given beside a workload"),
        (["smollm2", "--devices", "H200", "--workload", "W7"], "'W7' is not known; there are W1, W2, W3"),
        ([*SMALL, "--arrivals", "constant"], "--request-rate is missing"),
        ([*SMALL, "--arrivals", "at-once", "--request-rate", "3"], "given beside --arrivals='at-once'"),
        ([*SMALL, "--request-rate", "0"], "--request-rate must be above 0"),
        ([*SMALL, "--html", "page.pdf"], "is no .html"),
        ([*SMALL, "--png", "run.png"], "matplotlib, which is not installed"),
        ([*SMALL, "--sweep", "--sweep-num-seqs", "x"], "--sweep-num-seqs: 'x' is not a whole number"),
        ([*SMALL, "--sweep", "--max-model-len", "64"], "no setting can run the requests: request 0 of the traffic"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, arguments, said):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find(name))
    code, _, err = called(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert said in err
