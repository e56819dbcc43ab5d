import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


@pytest.fixture(scope="module")
def arguments():
    spec = importlib.util.spec_from_file_location("bench_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.arguments


def test_the_command_that_it_gives_for_itself_is_understood(arguments):
    (line,) = (line for line in SCRIPT.read_text().splitlines() if line.startswith("python scripts/bench.py"))
    spelled = arguments(line.split()[2:])
    assert spelled[:2] == ["bench", "throughput"]
    assert "--workloads" not in spelled
    assert spelled[2:4] == ["--workload", "L1,L8"]


def test_without_a_choice_the_latency_workloads_are_measured(arguments):
    assert arguments([])[2:] == ["--workload", "L1,L8"]
    assert arguments(["--limit=3", "--workloads=W1"])[2:] == ["--num-prompts=3", "--workload=W1"]
