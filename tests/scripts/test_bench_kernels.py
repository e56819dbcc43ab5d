import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels.py"


@pytest.mark.interpreter
def test_a_case_is_timed_and_written_with_its_share_of_the_ceilings(tmp_path: Path):
    file = tmp_path / "kernels.json"
    flags = ["--shrink", "64", "--rounds", "2", "--only", "matmul 8B layer M=8", "--json", str(file)]
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads(file.read_text())
    assert content["ceilings"]["copy"] > 0
    assert content["ceilings"]["matmul"] > 0
    (row,) = content["rows"]
    assert row["case"] == "matmul 8B layer M=8"
    assert row["micros"] > 0
    assert 0 < row["share"] < 2  # of ceilings measured a moment before, on a machine with other work
    assert "best of each case" in done.stdout
    assert "TB/s" in done.stdout
