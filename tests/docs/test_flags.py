import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_docs.py"


def check(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60)


def test_the_page_of_flags_is_what_the_code_says():
    done = check(SCRIPT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("changed", ["| `--block-size` | `32` |", "| `--blocks` | `16` |"])
def test_a_page_that_differs_from_the_code_is_found_out(tmp_path: Path, changed: str):
    for name in ("docs", "scripts"):
        (tmp_path / name).mkdir()
    page = (SCRIPT.parents[1] / "docs" / "flags.md").read_text()
    row = "| `--block-size` | `16` |"
    assert row in page
    (tmp_path / "docs" / "flags.md").write_text(page.replace(row, changed))
    copy = tmp_path / "scripts" / SCRIPT.name
    copy.write_text(SCRIPT.read_text())
    done = check(copy)
    assert done.returncode == 1
    assert "out of date" in done.stderr
