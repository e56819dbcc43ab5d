"""Runs `jaxllm bench` in this process on a tiny model, and gives what it printed and wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.bench.args import bench_engine_args
from jaxllm.cli import main
from jaxllm.config.engine_args import EngineArgs

# One set of shapes for all tests, so that each step is compiled once.
SIZES = {"max_model_len": 512, "num_gpu_blocks_override": 40, "max_num_seqs": 4, "max_num_batched_tokens": 128}
TINY = ["--enforce-eager", *(f"--{name}={value}" for name, value in SIZES.items())]


@pytest.fixture
def tiny(golden: Path) -> EngineArgs:
    """The engine that `bench` measures here."""
    return bench_engine_args({"model": str(golden / "llama"), "enforce_eager": True, **SIZES})


@pytest.fixture
def bench(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Calls `jaxllm bench` with flags; gives its JSON and its output."""
    monkeypatch.setattr("jaxllm.bench.session.prepare_environment", lambda environment, has_store: None)

    def call(command: str, *flags: str) -> tuple[dict[str, Any], str]:
        file = tmp_path / "out.json"
        with pytest.raises(SystemExit) as exit:
            main(["bench", command, "--model", str(golden / "llama"), *TINY, "--output-json", str(file), *flags])
        captured = capsys.readouterr()
        assert exit.value.code == 0, captured.err
        return json.loads(file.read_text()), captured.out

    return call


@pytest.fixture
def refused(golden: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Calls `jaxllm bench` with a mistake; gives the one line that it answers with."""

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as exit:
            main(["bench", *arguments])
        captured = capsys.readouterr()
        assert exit.value.code == 2
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return line

    return call
