"""What the scheduler makes of the comparison's workloads, on a device that is a formula."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate_workload.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_workload", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _rows(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str):
    monkeypatch.setattr(sys, "argv", ["simulate_workload.py", *options])
    script.main()
    lines = [[cell.strip() for cell in line.strip(" |").split("|")] for line in capsys.readouterr().out.splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_at_most_12_percent_of_a_workloads_tokens_are_padding(script, monkeypatch, capsys):
    rows = _rows(script, monkeypatch, capsys, "--workloads", "W1,W2")
    assert [row["workload"] for row in rows] == ["W1", "W2"]
    assert all(float(row["padding %"]) <= 12.0 for row in rows)


def test_filling_sizes_saves_padding_and_time(script, monkeypatch, capsys):
    (filled,) = _rows(script, monkeypatch, capsys, "--workloads", "W2")
    (taken,) = _rows(script, monkeypatch, capsys, "--workloads", "W2", "--no-filling")
    assert float(filled["padding %"]) < 0.5 * float(taken["padding %"])
    assert float(filled["seconds"]) < float(taken["seconds"])


def test_a_target_holds_the_90th_percentile_and_makes_prompts_wait(script, monkeypatch, capsys):
    (free,) = _rows(script, monkeypatch, capsys, "--workloads", "W2")
    (paced,) = _rows(script, monkeypatch, capsys, "--workloads", "W2", "--target-tpot-ms", "15")
    assert float(free["p90"]) > 15.0 >= float(paced["p90"])
    assert float(paced["TTFT ms"].replace(",", "")) > float(free["TTFT ms"].replace(",", ""))
