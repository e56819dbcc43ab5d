import subprocess
from types import SimpleNamespace

import jax
import pytest

from jaxllm import __version__
from jaxllm.cli import main
from jaxllm.terminal import collect_env


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for its own process is undone."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def table(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    with pytest.raises(SystemExit) as exit:
        main(["collect-env"])
    assert exit.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:22].strip(): line[22:].strip() for line in lines}


def test_it_tells_versions_devices_and_machine(capsys: pytest.CaptureFixture[str]):
    told = table(capsys)
    assert told["jaxllm"] == __version__
    assert told["jax"] == jax.__version__
    assert told["devices"].endswith(f"of platform {jax.devices()[0].platform}")
    for label in ("python", "system", "cpu", "memory"):
        assert told[label]
        assert "not available" not in told[label]


def test_secrets_are_told_only_as_set(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    monkeypatch.setenv("JAX_SECRET_KEY", "hunter2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    monkeypatch.setenv("MY_OWN", "hunter2")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    told = table(capsys)
    assert "hunter2" not in str(told)
    assert (told["HF_TOKEN"], told["JAX_SECRET_KEY"], told["OPENAI_API_KEY"]) == ("set", "set", "not set")
    assert told["XLA_FLAGS"] == "--xla_dump_to=/tmp/x"
    assert "MY_OWN" not in told


def test_what_fails_or_is_missing_is_told_and_the_rest_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def broken() -> list:
        raise RuntimeError("Unable to initialize backend 'cuda'\nand much more")

    monkeypatch.setattr(jax, "devices", broken)
    monkeypatch.setattr(collect_env, "_memory", lambda: 1 / 0)
    monkeypatch.setattr(collect_env.shutil, "which", lambda program: None)
    told = table(capsys)
    assert told["devices"] == "not available: RuntimeError: Unable to initialize backend 'cuda'"
    assert told["memory"] == "not available: ZeroDivisionError: division by zero"
    assert told["driver"] == "no nvidia-smi here"
    assert "HF_TOKEN" in told


@pytest.mark.parametrize(
    ("code", "out", "err", "says"),
    [
        (0, "580.1, NVIDIA H200, 1 MiB\n580.1, NVIDIA H200, 2 MiB\n", "", "580.1, NVIDIA H200, 1 MiB ; 580.1, NVIDIA"),
        (9, "", "couldn't communicate with the driver\n", "nvidia-smi failed: couldn't communicate with the driver"),
    ],
)
def test_the_driver_is_told_as_nvidia_smi_tells_it(
    code: int, out: str, err: str, says: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(collect_env.shutil, "which", lambda program: program)
    done = subprocess.CompletedProcess([], code, out, err)
    monkeypatch.setattr(collect_env.subprocess, "run", lambda *args, **settings: done)
    assert says in dict(collect_env.rows())["driver"]


def test_a_devices_memory_is_told_where_jax_knows_it():
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 3 << 30})
    assert collect_env._device_memory(device) == ", 3.0 GiB for jax"
    assert collect_env._device_memory(SimpleNamespace(memory_stats=lambda: None)) == ", memory not told"
