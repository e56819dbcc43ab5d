"""Every `jaxllm ...` line of a page is a command with flags that exist and values that it takes; none is run."""

import contextlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.bench.args import LatencyArgs, SuiteArgs, ThroughputArgs, bench_engine_args
from jaxllm.bench.serve_args import ServeBenchArgs
from jaxllm.cli import COMMANDS, serve_args
from jaxllm.options import OptionParser
from jaxllm.terminal.args import ChatArgs, CompleteArgs, split_values

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_BENCH = {"bench throughput": ThroughputArgs, "bench latency": LatencyArgs, "bench suite": SuiteArgs}
_TERMINAL = {"chat": ChatArgs, "complete": CompleteArgs}


def commands_of(page: Path, blocks: Callable) -> list[list[str]]:
    """The words behind `jaxllm` of each line of the shell blocks."""
    lines = [line for block in blocks(page) if block.info == "bash" for line in block.text.splitlines()]
    found = [re.split(r"(?:^|\| )jaxllm ", line, maxsplit=1) for line in lines]
    return [shlex.split(parts[1], comments=True) for parts in found if len(parts) == 2]


def check(words: list[str], folder: Path) -> None:
    """Parses a command as `jaxllm` does, and lets whoever owns the values check them."""
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    parser = OptionParser(own=COMMANDS[name].own, description=COMMANDS[name].help)
    COMMANDS[name].add_flags(parser)
    rest = words[len(name.split()) :]
    if "--config" in rest:
        rest[rest.index("--config") + 1] = str(folder / rest[rest.index("--config") + 1])
    values = parser.parse(rest)
    if name == "serve":
        serve_args(values)
    elif name == "bench serve":
        ServeBenchArgs(**values)
    elif name in _TERMINAL:
        split_values(_TERMINAL[name], values)
    elif name in _BENCH:
        own = {key: value for key, value in values.items() if key in _BENCH[name].__slots__}
        _BENCH[name](**own)
        bench_engine_args({key: value for key, value in values.items() if key not in own})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_is_one_that_jaxllm_takes(page: Path, blocks: Callable, tmp_path: Path):
    for block in blocks(page):
        if block.info == "yaml":  # the first line names the file
            (tmp_path / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
    for words in commands_of(page, blocks):
        with contextlib.suppress(SystemExit):  # help was asked for
            check(words, tmp_path)


def test_the_page_of_the_command_line_shows_every_command(blocks: Callable):
    page = ROOT / "docs" / "cli.md"
    for name in COMMANDS:
        assert f"`jaxllm {name}`" in page.read_text()
    shown = {words[0] for words in commands_of(page, blocks)}
    assert {"serve", "chat", "complete", "collect-env"} <= shown
    assert {tuple(words[:2]) for words in commands_of(ROOT / "docs" / "benchmarking.md", blocks)} >= {
        ("bench", "throughput"),
        ("bench", "latency"),
        ("bench", "serve"),
        ("bench", "suite"),
    }
