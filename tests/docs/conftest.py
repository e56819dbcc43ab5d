"""Takes the fenced code blocks out of a page and runs them in order, as a reader would in one session."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """One fenced block: its info string, its text, and the line of the page on which the text starts."""

    info: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(m["info"].strip(), m["text"], text.count("\n", 0, m.start("text")) + 1) for m in _FENCE.finditer(text)
    ]


def run_page(page: Path, names: dict[str, Any], info: str = "python") -> int:
    """Runs the blocks marked `info`; a text block right after one is what it must print. Gives the number run."""
    num_run, printed = 0, None
    for block in blocks_of(page):
        if block.info == info:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                # Blank lines in front make the line numbers of a traceback those of the page.
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
            num_run, printed = num_run + 1, output.getvalue()
        elif block.info == "text" and printed is not None:
            assert printed == block.text, f"{page.name}, line {block.line}: the example prints something else"
            printed = None
        else:
            printed = None
    return num_run


@pytest.fixture(scope="session")
def docs() -> Path:
    return ROOT / "docs"


@pytest.fixture(scope="session")
def blocks() -> Callable[[Path], list[Block]]:
    return blocks_of


@pytest.fixture(scope="session")
def run() -> Callable[..., int]:
    return run_page
