"""The script around compute-sanitizer, with a stand-in for it. What it checks takes a GPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize_kernels.py"


def run(folder: Path, output: str | None) -> subprocess.CompletedProcess[str]:
    """Runs the script on a machine whose compute-sanitizer prints this, or that has none."""
    if output is not None:
        sanitizer = folder / "compute-sanitizer"
        sanitizer.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
        sanitizer.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    command = [sys.executable, str(SCRIPT)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


CLEAN = "========= COMPUTE-SANITIZER\n@@ write_rows\ndone in 0.4 s\n@@ turn_rows\ndone in 0.5 s\n"
BAD = "========= Invalid __global__ write of size 2 bytes\n=========     at write_rows+0x70\n"
PLANTED = "@@ a write far beyond the cache, planted\n"


def test_each_kernel_has_a_line_when_all_are_clean(tmp_path):
    done = run(tmp_path, CLEAN + PLANTED + BAD)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "write_rows: clean, 0.4 s",
        "turn_rows: clean, 0.5 s",
        "a write far beyond the cache, planted: found",
    ]


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (CLEAN.replace("done in 0.5 s", BAD + "done in 0.5 s") + PLANTED + BAD, "turn_rows: 1 invalid accesses, 0.5 s"),
        (CLEAN.replace("done in 0.5 s", "Killed") + PLANTED + BAD, "turn_rows: clean, DID NOT END"),
        (
            CLEAN + PLANTED + "done in 0.1 s",
            "a write far beyond the cache, planted: NOT FOUND, so nothing above is proven",
        ),
        (CLEAN, "turn_rows: clean, 0.5 s"),
        ("Traceback: no module named jax", "no kernel ran:"),
    ],
)
def test_whatever_is_not_proven_clean_fails(output, line, tmp_path):
    done = run(tmp_path, output)
    assert done.returncode == 1, done.stdout + done.stderr
    assert line in done.stdout.splitlines()


def test_a_device_that_the_sanitizer_refuses_is_named_in_one_line(tmp_path):
    done = run(tmp_path, "========= Error: Device not supported. Please refer to the documentation")
    assert done.returncode == 3
    assert done.stdout == "compute-sanitizer refuses this device (Device not supported): nothing was checked\n"


def test_a_machine_without_the_sanitizer_is_told_so_in_one_line(tmp_path):
    if any(Path(place).exists() for place in places()):
        pytest.skip("this machine has one")
    done = run(tmp_path, None)
    assert done.returncode == 2
    assert done.stdout.startswith("compute-sanitizer is neither on the PATH nor at /usr/local/cuda")
    assert done.stdout.endswith(": nothing was checked\n")


def places() -> tuple[str, ...]:
    spec = importlib.util.spec_from_file_location("sanitize_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PLACES
