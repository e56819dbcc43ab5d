import os
from pathlib import Path

import numpy as np
import pytest

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.file_bytes import file_start, map_bytes, map_columns


def test_any_range_is_mapped_whatever_the_pages(tmp_path):
    path = tmp_path / "data"
    data = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8)
    path.write_bytes(data.tobytes())
    for start, stop in ((0, 1), (0, 100_003), (4095, 4097), (65_536, 65_540), (70_001, 100_003), (9, 9)):
        np.testing.assert_array_equal(map_bytes(path, start, stop), data[start:stop])


def test_columns_of_a_table_are_those_bytes_of_each_row(tmp_path):
    path = tmp_path / "data"
    data = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8)
    path.write_bytes(data.tobytes())
    for start, rows, row_bytes, first, last in (
        (3, 10, 10_000, 0, 10_000),
        (65_000, 5, 7_000, 6_000, 7_000),
        (9, 1, 8, 2, 5),
    ):
        table = data[start : start + rows * row_bytes].reshape(rows, row_bytes)
        found = map_columns(path, start, rows, row_bytes, first, last)
        np.testing.assert_array_equal(found, table[:, first:last])
        assert not found.flags.writeable


def test_a_mapped_array_cannot_be_written_and_outlives_the_file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"abcdef")
    array = map_bytes(path, 2, 5)
    path.unlink()
    assert array.tobytes() == b"cde"
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_file_that_shrank_or_vanished_is_named(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(10))
    with pytest.raises(InputError, match="shrank to 10 bytes while it was read; 11 are needed"):
        map_bytes(path, 5, 11)
    path.unlink()
    with pytest.raises(InputError, match=r"cannot read .*No such file"):
        map_bytes(path, 0, 5)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(b"secret")
    path.chmod(0)
    if os.geteuid() == 0:  # root reads everything: let the kernel's answer be played
        monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    for read in (lambda: file_start(path, 4), lambda: map_bytes(path, 0, 4)):
        with pytest.raises(InputError, match=f"cannot read {path}: Permission denied"):
            read()
