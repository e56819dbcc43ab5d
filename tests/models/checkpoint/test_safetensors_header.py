import json
import struct
from pathlib import Path

import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.safetensors_header import read_header

TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def one_line(path: Path) -> str:
    with pytest.raises(InputError) as raised:
        read_header(path)
    message = str(raised.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_metadata_is_no_tensor(tmp_path, write_safetensors):
    path = write_safetensors(tmp_path / "m", {"__metadata__": {"format": "pt"}, "w": TENSOR}, bytes(24))
    (tensor,) = read_header(path).values()
    assert (tensor.type_name, tensor.shape) == ("F32", (2, 3))
    assert (tensor.start, tensor.stop) == (path.stat().st_size - 24, path.stat().st_size)


def test_truncated_data_says_both_sizes(tmp_path, write_safetensors):
    path = write_safetensors(tmp_path / "m", {"w": TENSOR}, bytes(23))
    size = path.stat().st_size
    assert f"claims {size + 1} bytes, the file has {size}" in one_line(path)


def test_a_truncated_header_says_both_sizes(tmp_path, write_safetensors):
    path = write_safetensors(tmp_path / "m", {"w": TENSOR}, bytes(24))
    stop = path.stat().st_size - 24
    path.write_bytes(path.read_bytes()[:40])
    assert f"claims to end at byte {stop}, the file has 40" in one_line(path)
    path.write_bytes(b"")
    assert "the file has 0" in one_line(path)
    path.write_bytes(b"abcd")
    assert "the file has 4" in one_line(path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 100_000,
        {"w": 5},
        {"w": {"dtype": "F32", "shape": [2, 3]}},
        {"w": {**TENSOR, "shape": 6}},
        {"w": {**TENSOR, "shape": ["two", 3]}},
        {"w": {**TENSOR, "data_offsets": [24, 0]}},
        {"w": {**TENSOR, "data_offsets": [-24, 0]}},
        {"w": {**TENSOR, "shape": [2, 4]}},
        {"w": {**TENSOR, "shape": [-2, -3]}},
    ],
    ids=str,
)
def test_a_garbage_header_is_refused(tmp_path, write_safetensors, header):
    path = write_safetensors(tmp_path / "m", header, bytes(24))
    length = len(header if isinstance(header, bytes) else json.dumps(header))
    assert f"its header of {length} bytes is garbage" in one_line(path)


def test_files_that_are_something_else_are_refused(tmp_path):
    path = tmp_path / "m"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "is a Git LFS pointer, not the file itself: run `git lfs pull`" in one_line(path)
    path.write_bytes(b"PK\x03\x04" + bytes(60) + struct.pack("<Q", 1))
    assert "truncated or not a safetensors file" in one_line(path)
    path.unlink()
    assert "cannot read" in one_line(path)
