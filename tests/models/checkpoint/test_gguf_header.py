import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.gguf_header import READABLE_TYPES, read_gguf_header

EMBEDDING = "token_embd.weight"


def one_line(path: Path) -> str:
    with pytest.raises(InputError) as raised:
        read_gguf_header(path)
    message = str(raised.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def file_of(path: Path, fields: bytes, num_fields: int, tensors: bytes = b"", num_tensors: int = 0) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_fields) + fields + tensors)
    return path


def test_the_header_says_what_the_gguf_package_says(write_gguf):
    path = write_gguf(metadata={"tokenizer.ggml.tokens": ["a", "Ġé", "", "日本"], "tokenizer.ggml.scores": [0.5, -1.0]})
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    assert header.metadata.pop(epsilon) == 1e-5
    assert theirs.pop(epsilon) == pytest.approx(1e-5)
    assert header.metadata == theirs
    assert {name: (t.kind, t.shape, t.start) for name, t in header.tensors.items()} == {
        t.name: (t.tensor_type, tuple(t.shape[::-1].tolist()), t.data_offset) for t in reader.tensors
    }


def test_every_scalar_type_is_read(tmp_path):
    values = {
        0: ("B", 200),
        1: ("b", -3),
        2: ("H", 60000),
        3: ("h", -300),
        4: ("I", 1 << 31),
        5: ("i", -5),
        6: ("f", 0.1),
    }
    values |= {7: ("?", True), 10: ("Q", 1 << 63), 11: ("q", -(1 << 60)), 12: ("d", 1 / 3)}
    fields = b"".join(
        text(f"k{number}") + struct.pack("<I", number) + struct.pack("<" + code, value)
        for number, (code, value) in values.items()
    )
    arrays = b"".join(
        text(f"a{number}") + struct.pack("<IIQ", 9, number, 2) + struct.pack("<2" + code, value, value)
        for number, (code, value) in values.items()
    )
    metadata = read_gguf_header(file_of(tmp_path / "m.gguf", fields + arrays, 22)).metadata
    for number, (_, value) in values.items():
        assert metadata[f"k{number}"] == value
        assert metadata[f"a{number}"] == pytest.approx([value, value])


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file: it starts with b'PK\\x03\\x04'" in one_line(path)
    path.write_bytes(b"")
    assert "not a GGUF file: it starts with b''" in one_line(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    assert "git lfs pull" in one_line(path)
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert "at least 24 bytes, this one 8" in one_line(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    assert "version 1, readable are 2 and 3" in one_line(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in one_line(path)


def test_a_file_that_cannot_be_opened_says_why(tmp_path):
    assert "No such file" in one_line(tmp_path / "absent.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "Is a directory" in one_line(tmp_path / "folder.gguf")


def test_truncated_data_says_both_sizes(write_gguf):
    path = write_gguf()
    whole = path.read_bytes()
    stop = max(tensor.stop for tensor in read_gguf_header(path).tensors.values())
    path.write_bytes(whole[: stop - 1])
    assert f"claims {stop} bytes, the file has {stop - 1}" in one_line(path)
    path.write_bytes(whole[:stop])
    read_gguf_header(path)


def test_a_header_cut_anywhere_is_called_truncated(write_gguf):
    path = write_gguf(metadata={"tokenizer.ggml.tokens": ["hello", "world"], "tokenizer.ggml.scores": [0.5, -1.0]})
    whole = path.read_bytes()
    header_stop = min(tensor.start for tensor in read_gguf_header(path).tensors.values())
    for size in range(24, header_stop - 32, 7):
        path.write_bytes(whole[:size])
        assert "truncated" in one_line(path)


def test_absurd_counts_are_refused_at_once(tmp_path):
    huge = (1 << 60) + 1
    array_of_strings = text("k") + struct.pack("<IIQ", 9, 8, huge)
    array_of_numbers = text("k") + struct.pack("<IIQ", 9, 5, huge)
    for fields in (array_of_strings, array_of_numbers, struct.pack("<Q", huge) + b"key"):
        assert "truncated" in one_line(file_of(tmp_path / "m.gguf", fields, 1))
    many_axes = text("t") + struct.pack("<I", 1 << 30)
    assert f"has {1 << 30} axes" in one_line(file_of(tmp_path / "m.gguf", b"", 0, many_axes, 1))


def test_garbage_in_the_header_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    nested = text("k") + struct.pack("<IIQ", 9, 9, 1)
    assert "k has type number 9, which is not known" in one_line(file_of(path, nested, 1))
    assert "k has type number 77" in one_line(file_of(path, text("k") + struct.pack("<I", 77), 1))
    assert "not UTF-8" in one_line(file_of(path, struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<I", 0), 1))
    alignment = text("general.alignment") + struct.pack("<II", 4, 0)
    assert "general.alignment is 0" in one_line(file_of(path, alignment, 1))
    tensor = text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)
    assert "tensor t occurs twice" in one_line(file_of(path, b"", 0, tensor + tensor, 2))
    odd_row = text("t") + struct.pack("<IQQIQ", 2, 48, 2, int(Kind.Q8_0), 0)
    assert "t of shape [2, 48] cannot be stored in rows of Q8_0" in one_line(file_of(path, b"", 0, odd_row, 1))


def test_a_type_without_a_tested_decoder_is_refused_by_name(write_gguf):
    raw = gguf.quants.quantize(np.ones((32, 256), np.float32), Kind.TQ1_0)
    message = one_line(write_gguf({EMBEDDING: (raw, Kind.TQ1_0)}))
    assert f"{EMBEDDING} has type TQ1_0" in message
    assert message.endswith(f"readable are {', '.join(kind.name for kind in READABLE_TYPES)}")


def test_a_type_number_from_the_future_is_refused_by_number(write_gguf):
    path = write_gguf()
    data = bytearray(path.read_bytes())
    at = data.index(text(EMBEDDING)) + len(text(EMBEDDING)) + 4 + 2 * 8
    assert data[at : at + 4] == bytes(4)  # F32
    data[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(data)
    assert f"{EMBEDDING} has type number 999; readable are F32, F16" in one_line(path)
