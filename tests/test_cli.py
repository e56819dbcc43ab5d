import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxllm import __version__
from jaxllm.cli import COMMANDS, main, serve_args
from jaxllm.config.engine_args import NOT_BUILT, EngineArgs
from jaxllm.config.flags_without_effect import FLAGS_WITHOUT_EFFECT
from jaxllm.config.server_args import NOT_BUILT_IN_SERVER, ServerArgs
from jaxllm.flag_groups import GROUPS, group_of

ROOT = Path(__file__).parents[1]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes what would be served instead of serving it."""
    from jaxllm.server import serve

    taken: list[Any] = []
    monkeypatch.setattr("jaxllm.cli.prepare_environment", lambda environment, has_store: None)
    monkeypatch.setattr(serve, "serve", lambda *args: taken.extend(args) or 0)
    return taken


def run(arguments: Sequence[str]) -> int | str | None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return exit.value.code


def refusal(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a command line is refused."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line.removeprefix("jaxllm: ")


def test_the_flags_reach_the_engine_and_the_server(served: list[Any]):
    flags = (
        "--dtype half --max-model-len 2k --no-use-tqdm-on-load --port 0 --served-model-name a b --shutdown_timeout 5"
    )
    assert run(["serve", "my/model", *flags.split()]) == 0
    engine, server = served
    assert engine == EngineArgs(model="my/model", dtype="half", max_model_len=2000, use_tqdm_on_load=False)
    assert server == ServerArgs(port=0, served_model_name=("a", "b"), shutdown_timeout=5.0)


def test_without_flags_the_defaults_are_served(served: list[Any]):
    assert run(["serve"]) == 0
    assert served == [EngineArgs(), ServerArgs()]


def test_the_model_may_be_named_twice_only_if_it_is_the_same(served: list[Any], capsys: pytest.CaptureFixture[str]):
    assert run(["serve", "a", "--model", "a"]) == 0
    assert served[0].model == "a"
    assert refusal(["serve", "a", "--model", "smollm2"], capsys).startswith("two models are given, 'a' and --model=")


def test_every_field_of_both_dataclasses_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]):
    assert run(["serve", "--help=all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for flags in (EngineArgs, ServerArgs):
        for field in dataclasses.fields(flags):
            assert "--" + field.name.replace("_", "-") in text
            assert field.metadata["help"] in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--max-model-lenn", "4"], "unknown flag --max-model-lenn; did you mean --max-model-len?"),
        (["serve", "--port", "http"], "--port: 'http' is not a whole number"),
        (["serve", "--port", "70000"], "--port=70000 is not between 0 and 65535"),
        (["serve", "--block-size", "7"], "--block-size must be one of 8, 16"),
        (["serve", "--uvicorn-log-level", "loud"], "--uvicorn-log-level='loud' is not known"),
        (["serve", "--shutdown-timeout", "-1"], "--shutdown-timeout must be at least 0"),
        (["serve", "--target-tpot-ms", "0"], "--target-tpot-ms must be at least 0.001, got 0.0"),
        (["serve", "--root-path", "x"], "must start with a slash"),
        (["serve", "-pp", "2"], "--pipeline-parallel-size=2 is not supported yet"),
        (["serve", "--enable-auto-tool-choice"], "--enable-auto-tool-choice=True is not supported yet"),
        (["serve", "--ssl-keyfile", "key.pem"], "HTTPS needs --ssl-certfile"),
        (["sevre"], "there is no command 'sevre'; there are: serve, chat, complete, run-batch, bench, compile,"),
        (["bench", "speed"], "there is no command 'bench speed'; there are: throughput, latency"),
        (["serve", "--help=max-num-sequence"], "did you mean --help=max-num-seqs?"),
        (["serve", "--config"], "--config: expected the path of a YAML file"),
        (["serve", "--config", "/no/such.yaml"], "--config='/no/such.yaml' cannot be read: No such file or directory"),
        (["collect-env", "--model", "x"], "unknown flag --model"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], says: str, served: list[Any], capsys: pytest.CaptureFixture[str]
):
    assert says in refusal(arguments, capsys)
    assert served == []


def test_a_secret_that_is_refused_is_not_printed(served: list[Any], capsys: pytest.CaptureFixture[str]):
    assert "hunter2" not in refusal(["serve", "--api-key", "a", "hunter2", "--admin-api-key", "hunter2"], capsys)


@pytest.mark.parametrize("name", sorted({**NOT_BUILT, **NOT_BUILT_IN_SERVER}))
def test_a_flag_that_is_not_built_is_taken_at_the_value_that_asks_for_nothing(name: str):
    neutral = {**NOT_BUILT, **NOT_BUILT_IN_SERVER}[name]
    if neutral is not None:
        assert serve_args({name: neutral}) == (EngineArgs(), ServerArgs())
    wrong = not neutral if isinstance(neutral, bool) else 77
    with pytest.raises(ValueError, match=f"{name}.* is not supported yet"):
        serve_args({name: wrong})


def test_no_flag_is_both_built_and_refused():
    built = [field.name for flags in (EngineArgs, ServerArgs) for field in dataclasses.fields(flags)]
    assert len(built) == len(set(built))
    assert not set(built) & {**NOT_BUILT, **NOT_BUILT_IN_SERVER}.keys()
    assert not NOT_BUILT.keys() & NOT_BUILT_IN_SERVER.keys()


def test_a_flag_without_effect_is_taken_with_a_line_that_says_why(
    served: list[Any], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    flags = "--trust-remote-code --model-impl auto --allowed-media-domains a b -dcp 2 --worker-cls=x.Y --no-enable-eplb"
    assert run(["serve", *flags.split()]) == 0
    assert served == [EngineArgs(), ServerArgs()]
    assert "trust_remote_code has no effect: code of a model's repository is never run" in caplog.text
    assert len(caplog.messages) == 6
    assert run(["serve", "--help=trust-remote-code"]) == 0
    assert "is taken, but has no effect: code of" in capsys.readouterr().out
    assert not FLAGS_WITHOUT_EFFECT.keys() & {**NOT_BUILT, **NOT_BUILT_IN_SERVER}.keys()
    fields = {field.name for flags in (EngineArgs, ServerArgs) for field in dataclasses.fields(flags)}
    assert not FLAGS_WITHOUT_EFFECT.keys() & fields


def test_an_api_key_may_stand_in_the_environment_and_a_typed_one_wins():
    assert serve_args({}, {"VLLM_API_KEY": "a"})[1].api_key == ("a",)
    assert serve_args({"api_key": ("b",)}, {"VLLM_API_KEY": "a"})[1].api_key == ("b",)


def test_a_file_gives_flags_and_those_that_are_typed_win(served: list[Any], tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: my/model\nmax-model-len: 4K\nblock_size: 32\nuse-tqdm-on-load: false\n"
        "served-model-name: [a, b]\nshutdown_timeout: 5\nrevision:\n"
    )
    assert run(["serve", "--block-size", "64", "--config", str(file)]) == 0
    args = EngineArgs(model="my/model", max_model_len=4096, block_size=64, use_tqdm_on_load=False)
    assert served == [args, ServerArgs(served_model_name=("a", "b"), shutdown_timeout=5.0)]
    served.clear()
    assert run(["serve", "other", f"--config={file}"]) == 0
    assert served[0].model == "other"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max-model-lenn: 4", ": unknown key 'max-model-lenn'; did you mean 'max-model-len'?"),
        ("engine:\n  dtype: half", ": unknown key 'engine'"),
        ("port: http", ": --port: 'http' is not a whole number"),
        ("block-size: [8, 16]", ": --block-size: "),
        ("enforce-eager: sometimes", ": enforce-eager is true or false, got 'sometimes'"),
        ("dtype: [", ", line 1: no valid YAML"),
        ("- dtype", " must hold one mapping of flag names to values, got a list"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_name(
    content: str, says: str, served: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    assert f"{file}{says}" in refusal(["serve", "--config", str(file)], capsys)
    assert served == []


def test_an_empty_file_is_as_good_as_none(served: list[Any], tmp_path: Path):
    (tmp_path / "empty.yaml").touch()
    assert run(["serve", "--config", str(tmp_path / "empty.yaml")]) == 0
    assert served == [EngineArgs(), ServerArgs()]


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]):
    assert run([]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in text
        assert command.help in text
    assert run(["bench"]) == 0
    assert "collect-env" not in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]):
    for topic in ("", "=all"):
        assert run([*name.split(), f"--help{topic}"]) == 0
        assert capsys.readouterr().out.startswith(f"usage: jaxllm {name}")


def test_every_flag_is_in_one_group_only():
    names = [name for _, names in GROUPS.values() for name in names]
    assert len(names) == len(set(names))
    assert (group_of("block_size", "Other"), group_of("no_such_flag", "Other")) == ("CacheConfig", "Other")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxllm {__version__}\n"


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )


def test_help_loads_neither_jax_nor_the_http_server():
    source = (
        "import sys; from jaxllm.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    try: main([*name.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        "heavy = {'jax', 'numpy', 'fastapi', 'pydantic', 'uvicorn', 'httpx', 'yaml', 'tqdm'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = program("-c", source)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_reader_that_leaves_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        for arguments in (["--help"], ["serve", "--help=all"]):
            command = [sys.executable, "-m", "jaxllm", *arguments]
            done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=60, cwd=ROOT, check=False)
            assert (done.returncode, done.stderr) == (141, b"")
    finally:
        os.close(writing)


def test_help_is_quick():
    times = []
    for _ in range(5):  # the machine may be busy; the best of a few tells what the program takes
        start = time.perf_counter()
        assert program("-m", "jaxllm", "serve", "--help").returncode == 0
        times.append(time.perf_counter() - start)
        if times[-1] < 0.6:
            break
    assert min(times) < 0.6


@pytest.mark.parametrize("command", [["-m", "jaxllm", "serve"], ["scripts/serve.py"]])
def test_a_port_in_use_is_told_before_the_model_is_loaded(command: list[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = program(*command, "no/such/model", "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode == 2
    line = f"jaxllm: port {port} of 127.0.0.1 is in use; stop what listens there or choose another --port"
    assert done.stderr.splitlines() == [line]


def test_a_mistake_found_while_the_engine_starts_is_one_line_too():
    done = program("scripts/serve.py", "/no/such/folder", "--host", "127.0.0.1", "--port", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("jaxllm: ")
    assert "/no/such/folder" in done.stderr.splitlines()[-1]
