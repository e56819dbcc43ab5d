import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxllm.environment import keep_command_buffers

RANDOM = ("--num-prompts", "4", "--input-len", "20", "--output-len", "24")


def test_a_profile_tells_where_the_time_of_each_kind_of_step_goes(bench: Callable, tmp_path: Path):
    folder = tmp_path / "profile"
    report, printed = bench("throughput", *RANDOM, "--profile", str(folder), "--profile-steps", "6")
    written = json.loads((folder / "profile.json").read_text())
    assert written["command"] == report["command"]
    profile = written["profiles"]["random"]
    kinds = profile["kinds"]
    assert sum(kind["num_steps"] for kind in kinds.values()) == 12  # six from the first on, six from the middle
    assert kinds["decode T=4 B=4"]["num_steps"] >= 6
    assert any(name.startswith("mixed") for name in kinds)
    assert profile["num_unplaced"] == 0
    for name in ("decode T=4 B=4", next(name for name in kinds if name.startswith("mixed"))):
        kind = kinds[name]
        busy = sum(group["busy_us"] for group in kind["groups"].values())
        assert kind["wall_us"] == pytest.approx(busy + kind["gap_inside_us"] + kind["gap_before_us"])
        assert kind["groups"]["GEMM"]["busy_us"] > 0
        assert kind["groups"]["attention, decode"]["busy_us"] > 0
        assert kind["groups"]["norm + residual"]["count"] >= profile["num_layers"]
        assert kind["groups"].get("other", {"busy_us": 0})["busy_us"] < 0.1 * busy
        assert kind["phases"]["execute"]["count"] == 1
        assert any("PjitFunction" in call for call in kind["calls"])
    assert profile["steps_without_profiler"]["num_steps"] == report["results"][0]["steps"]["num_steps"]
    text = (folder / "profile.txt").read_text()
    assert "### decode T=4 B=4: " in printed
    assert "### decode T=4 B=4: " in text
    assert "without the profiler, host" in printed


def test_a_batch_of_latency_is_profiled_too(bench: Callable, tmp_path: Path):
    sizes = ("--batch-size", "2", "--input-len", "20", "--output-len", "6", "--num-iters", "2")
    bench("latency", *sizes, "--num-iters-warmup", "1", "--profile", str(tmp_path / "p"), "--profile-steps", "4")
    (profile,) = json.loads((tmp_path / "p" / "profile.json").read_text())["profiles"].values()
    assert sum(kind["num_steps"] for kind in profile["kinds"].values()) == 4


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--profile", "x", "--engine", "both"], "--profile='x' needs --engine='jaxllm', got 'both'"),
        (["--profile", "x", "--profile-steps", "0"], "--profile-steps must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_told_before_anything_is_started(flags: list[str], says: str, refused: Callable):
    assert says in refused("throughput", *flags)


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_started(refused: Callable, tmp_path: Path):
    (tmp_path / "file").touch()
    assert "cannot be made: " in refused("throughput", "--profile", str(tmp_path / "file" / "x"))


def test_command_buffers_are_kept_unless_the_user_decides():
    environment = {"XLA_FLAGS": "--xla_cpu_x=1"}
    keep_command_buffers(environment)
    assert environment["XLA_FLAGS"] == "--xla_cpu_x=1 --xla_enable_command_buffers_during_profiling=true"
    own = {"XLA_FLAGS": "--xla_enable_command_buffers_during_profiling=false"}
    keep_command_buffers(own)
    assert own["XLA_FLAGS"] == "--xla_enable_command_buffers_during_profiling=false"


def test_xla_knows_the_flag_that_keeps_them():
    environment = {"XLA_FLAGS": ""}
    keep_command_buffers(environment)
    code = "import jax; jax.jit(lambda x: x + 1)(1)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
