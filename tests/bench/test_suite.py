import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.bench import suite, suite_part
from jaxllm.bench.args import SuiteArgs
from jaxllm.bench.suite_plan import Part, plan
from jaxllm.bench.suite_report import Peer, Suite, read_peers, readme_lines, suite_lines
from jaxllm.cli import main

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
SPREAD = {"mean": 5.0, "p50": 5.0, "p90": 5.0, "p99": 5.0}
FLOOR = {"total": 2.0, "tpot": 0.004, "ttft": 0.001}


def result_of(workload: str, engine: str = "jaxllm") -> dict[str, Any]:
    return {
        "workload": workload,
        "engine": engine,
        "latencies_ms": {"ttft": SPREAD, "tpot": SPREAD},
        "output_tokens_per_second": 300.0,
        "tokens_per_second": 4000.0,
        "num_output_tokens": 1000,
        "total_num_tokens": 10_000,
        "steps": {"padding_share": 0.25, "host_ms": 1.5, "wait_ms": 0.5},
    } | ({"floor": FLOOR} if engine == "jaxllm" else {})


def written(*workloads: str) -> dict[str, Any]:
    """What a part writes."""
    facts = {"device": "1 x NVIDIA H200 (gpu)", "versions": {"jax": "0.11.2"}, "dtype": "bfloat16"}
    return {
        "ceilings": {"copy": 4e12, "matmul": 8e14},
        "facts": facts | {"start_up_seconds": 66.0, "engine": {"weights": "15 GiB"}},
        "results": {name: result_of(name) for name in workloads},
    }


@pytest.fixture
def report() -> Suite:
    """A suite of two parts, of which the second ran out of time."""
    report = Suite({"command": "jaxllm bench suite", "commit": "abc"})
    report.add(Part("llama-3.1-8b", 256, ("L1", "W1", "W3")), written("L1", "W1", "W3"))
    report.add(Part("llama-3.1-8b", 512, ("W1",)), {"error": "not run: the 60 s of --seconds were over"})
    return report


@pytest.fixture
def peer() -> Peer:
    figures = {("llama-3.1-8b", 256, "L1", "TPOT"): 4.885, ("llama-3.1-8b", 256, "", "start"): 73.4}
    return Peer("vLLM 0.26", "NVIDIA H200", figures)


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_model_is_started_once_for_each_number_of_sequences():
    parts = plan(SuiteArgs(models=("a,b",)))
    everything = ("L1", "L8", "W1", "W2", "W3")
    assert parts == [
        Part("a", 256, everything),
        Part("b", 256, everything),
        Part("a", 512, ("W1",)),
        Part("b", 512, ("W1",)),
    ]
    both = plan(SuiteArgs(models=("a",), engine="both", more_seqs=0))
    assert both == [Part("a", 256, (*everything, "H1")), Part("a", 256, ("H1",), "hf")]
    assert plan(SuiteArgs(models=("a",), workload=("L1,H1",))) == [Part("a", 256, ("L1", "H1"))]


def test_the_table_tells_each_figure_its_floor_and_what_others_reached(report: Suite, peer: Peer):
    rows = cells(suite_lines(report.as_json(), [peer]))
    assert rows[0][4:9] == ["figure", "measured", "floor", "of floor", "vLLM 0.26"]
    about = ["llama-3.1-8b", "256"]
    host = ["25.0%", "1.500", "0.500"]
    assert rows[2] == [*about, "L1", "jaxllm", "TTFT ms", "5.00", "1.00", "20%", "", *host]
    assert rows[3] == [*about, "L1", "jaxllm", "TPOT ms", "5.00", "4.00", "80%", "4.88", *host]
    assert rows[4] == [*about, "W1", "jaxllm", "output tok/s", "300.0", "500.0", "60%", "", *host]
    assert rows[5] == [*about, "W3", "jaxllm", "total tok/s", "4,000", "5,000", "80%", "", *host]
    assert rows[6] == [*about, "", "jaxllm", "start s", "66.0", "", "", "73.4", "", "", ""]
    assert rows[7][1:5] == ["512", "W1", "jaxllm", "not run: the 60 s of --seconds were over"]


def test_transformers_gets_the_floor_of_the_device(report: Suite):
    report.add(Part("llama-3.1-8b", 256, ("H1",)), written("H1"))
    hf = {**written()["facts"], "results": [result_of("H1", "hf static"), result_of("H1", "hf continuous")]}
    report.add(Part("llama-3.1-8b", 256, ("H1",), "hf"), hf)
    rows = cells(suite_lines(report.as_json(), []))
    assert [row[3:8] for row in rows if row[3].startswith("hf") and row[2] == "H1"] == [
        ["hf static", "output tok/s", "300.0", "500.0", "60%"],
        ["hf continuous", "output tok/s", "300.0", "500.0", "60%"],
    ]


def test_a_row_that_was_not_reached_says_so_once(report: Suite):
    part = Part("qwen3-0.6b", 256, ("L1",))
    report.add_missing(part)
    report.add_missing(part)
    assert [row["status"] for row in report.rows if row["model"] == "qwen3-0.6b"] == [
        "not run: the suite was ended before"
    ]
    assert not report.has_failed


def test_the_readme_shows_measured_rows_with_the_command_that_gives_them(report: Suite, peer: Peer):
    lines = readme_lines(report.as_json(), [peer], "docs/x.json")
    assert "at commit abc ([JSON](docs/x.json))." in lines[1]
    assert "| llama-3.1-8b | L1, one request: time per token | 5.00 ms | 80% | 4.88 ms |" in lines
    assert "| llama-3.1-8b | W3, prefill-heavy: tokens a second, prompts included | 4,000 | 80% |  |" in lines
    assert not any("512" in line for line in lines)
    assert lines[-3:] == ["```bash", "jaxllm bench suite", "```"]


def test_vllms_figures_are_shown_on_the_device_that_they_were_measured_on_only():
    (peer,) = read_peers(BENCHMARKS, "1 x NVIDIA H200 (gpu)")
    assert peer.engine == "vLLM 0.26"
    assert peer.figures["llama-3.1-8b", 256, "W1", "output"] == 18_931
    assert peer.figures["llama-3.1-8b", 512, "W1", "output"] == 20_587
    assert read_peers(BENCHMARKS, "1 x NVIDIA A100-SXM4-80GB (gpu)") == []
    assert "29 November 2026" in json.loads((BENCHMARKS / "vllm-0.26-h200.json").read_text())["provenance"]


class Process:
    """Stands in for a part's process: writes what one would, or never ends."""

    started: list[dict[str, Any]]
    contents: list[dict[str, Any]]

    def __init__(self, command: list[str]):
        given, self._written = (Path(word) for word in command[-2:])
        Process.started.append(json.loads(given.read_text()))
        self._content = Process.contents.pop(0)
        self._has_ended = False

    def wait(self, timeout: float | None = None) -> int:
        if self._content.pop("hangs", False) and not self._has_ended:
            self._written.write_text(json.dumps(self._content))
            raise subprocess.TimeoutExpired("part", timeout or 0)
        self._written.write_text(json.dumps(self._content))
        self._has_ended = True
        return 1 if "error" in self._content else 0

    def poll(self) -> int | None:
        return 0 if self._has_ended else None

    def terminate(self) -> None:
        self._has_ended = True


@pytest.fixture
def run_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Runs `jaxllm bench suite` over parts that write what is given; gives exit code, JSON, output and plans."""

    def call(contents: list[dict[str, Any]], *flags: str) -> tuple[int, dict[str, Any], str, list[dict[str, Any]]]:
        Process.started, Process.contents = [], contents
        monkeypatch.setattr(suite, "_start", Process)
        file = tmp_path / "suite.json"
        with pytest.raises(SystemExit) as exit:
            main(["bench", "suite", "--output-json", str(file), *flags])
        assert isinstance(exit.value.code, int)
        return exit.value.code, json.loads(file.read_text()), capsys.readouterr().out, Process.started

    return call


def test_a_suite_starts_each_part_and_writes_one_json(run_suite: Callable):
    contents = [written("L1", "W1"), written("W1")]
    code, report, printed, plans = run_suite(contents, "--models", "qwen3-0.6b", "--workload", "L1,W1")
    assert code == 0
    assert [(r["max_num_seqs"], r["workload"], r["status"]) for r in report["rows"]] == [
        (256, "L1", "measured"),
        (256, "W1", "measured"),
        (512, "W1", "measured"),
    ]
    assert [p["engine"]["max_num_seqs"] for p in plans] == [256, 512]
    assert {p["engine"]["load_format"] for p in plans} == {"dummy"}
    assert [p["ceilings"] for p in plans] == [None, [4e12, 8e14]]  # measured once
    for fact in ("command", "commit", "date", "device", "ceilings", "versions"):
        assert report[fact]
    assert "of floor" in printed
    assert "vLLM 0.26" in printed


def test_a_part_that_runs_out_of_time_leaves_what_it_measured(run_suite: Callable):
    contents = [written("L1") | {"hangs": True}]
    flags = ("--models", "qwen3-0.6b", "--workload", "L1,W1", "--more-seqs", "0", "--seconds", "60")
    code, report, printed, _ = run_suite(contents, *flags)
    assert code == 0
    late = "not run: the 60 s of --seconds were over"
    assert [(r["workload"], r["status"]) for r in report["rows"]] == [("L1", "measured"), ("W1", late)]
    assert late in printed


def test_a_part_whose_engine_takes_too_long_to_start_is_told(run_suite: Callable):
    flags = ("--models", "qwen3-0.6b", "--workload", "L1", "--more-seqs", "0", "--seconds", "60")
    code, report, printed, _ = run_suite([{"hangs": True}], *flags)
    assert code == 0
    (row,) = report["rows"]
    assert row["status"] == "not run: the engine had not started when the 60 s of --seconds were over"
    assert row["status"] in printed


def test_a_part_that_fails_is_told_and_the_others_are_measured(run_suite: Callable):
    contents = [{"error": "failed: out of memory"}, written("W1")]
    code, report, printed, _ = run_suite(contents, "--models", "qwen3-0.6b", "--workload", "W1")
    assert code == 1
    assert [r["status"] for r in report["rows"]] == ["failed: out of memory", "measured"]
    assert "failed: out of memory" in printed


def test_a_part_measures_a_real_engine(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite_part, "prepare_environment", lambda environment: None)
    sizes = {"max_model_len": 512, "num_gpu_blocks_override": 40, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    engine = {"model": str(golden / "llama"), "enforce_eager": True, "load_format": "dummy", **sizes}
    about = {"workloads": ["L1", "H1", "W1"], "num_prompts": 1, "num_iters": 1, "ceilings": [1e10, 1e11]}
    (tmp_path / "plan").write_text(json.dumps({"engine": engine, **about}))
    assert suite_part.main(str(tmp_path / "plan"), str(tmp_path / "written")) == 1
    content = json.loads((tmp_path / "written").read_text())
    assert list(content["results"]) == ["L1", "H1"]
    assert content["error"].startswith("failed: W1 has a request of 128 + 512 tokens, but max_model_len is 512")
    for result in content["results"].values():
        assert 0 < result["floor"]["tpot"] < result["floor"]["total"]
    assert content["facts"]["device"] == "1 x cpu (cpu)"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "x"], "--model='x' is set by the suite itself: give --models instead"),
        (["--max-num-seqs", "4"], "--max-num-seqs=4 is set by the suite itself: give --num-seqs instead"),
        (["--engine", "hf"], "--engine='hf' is not known; choose jaxllm or both"),
        (["--workload", "W9"], "--workload='W9' is not known; there are L1, L8, W1"),
        (["--seconds", "0"], "--seconds=0 leaves no time: it must be above 0"),
        (["--num-iters", "0"], "--num-iters must be at least 1, got 0"),
        (["--block-size", "0"], "--block-size"),
    ],
)
def test_a_mistake_is_told_before_anything_is_started(flags: list[str], says: str, refused: Callable):
    assert says in refused("suite", *flags)
