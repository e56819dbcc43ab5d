import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_docs.py"


def check(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60)


def test_the_generated_tables_are_what_code_and_benchmarks_say():
    done = check(SCRIPT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("page", "row", "changed"),
    [
        ("docs/flags.md", "| `--block-size` | `16` |", "| `--block-size` | `32` |"),
        ("docs/flags.md", "| `--block-size` | `16` |", "| `--blocks` | `16` |"),
        ("README.md", "L1, one request: time per token |", "L1, one request: time per token | 1.00 ms |"),
    ],
)
def test_a_page_that_differs_is_found_out(tmp_path: Path, page: str, row: str, changed: str):
    root = SCRIPT.parents[1]
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    shutil.copytree(root / "docs", tmp_path / "docs")
    shutil.copy(root / "README.md", tmp_path)
    text = (tmp_path / page).read_text()
    assert row in text
    (tmp_path / page).write_text(text.replace(row, changed))
    done = check(tmp_path / "scripts" / SCRIPT.name)
    assert done.returncode == 1
    assert f"{page} is out of date" in done.stderr
