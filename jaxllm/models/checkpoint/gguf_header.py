"""Parses the header of a GGUF file: metadata and where each tensor lies. Knows no architecture and reads no tensor.

The gguf package's own reader makes several numpy views per token: 2.5 s for 49,152 tokens and 14 s for 262,144.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.file_bytes import file_start, open_error, refuse_lfs_pointer

# The types that the tests check against an independent decoder.
READABLE_TYPES = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4  # GGML_MAX_DIMS


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` has the slowest axis first, the blocks of `kind` lie along the last."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of axis 0."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape[1:]) * size // block

    @property
    def stop(self) -> int:
        """The byte after the last."""
        return self.start + self.shape[0] * self.row_bytes


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What precedes the data of a GGUF file."""

    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Parses the header of a GGUF file, all of whose tensors are there and of a readable type.

    Raises:
        InputError: the file is unreadable, is not GGUF, is truncated, or holds a type that is not readable.
    """
    prefix, size = file_start(path, 32)
    refuse_lfs_pointer(path, prefix)
    if prefix[:4] != b"GGUF":
        raise InputError(f"{path} is not a GGUF file: it starts with {prefix[:4]!r}, not b'GGUF'")
    if size < 24:
        raise InputError(f"{path} is truncated: a GGUF file has at least 24 bytes, this one {size}; download it again")
    version = int.from_bytes(prefix[4:8], "little")
    if version not in (2, 3):
        why = "it is big-endian" if version & 0xFFFF == 0 else f"it has version {version}, readable are 2 and 3"
        raise InputError(f"{path} cannot be read: {why}; convert the model again")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _parse(path, _Cursor(data, 8))
    except OSError as error:
        raise open_error(path, error) from None
    except (struct.error, EOFError):
        raise InputError(
            f"{path} is truncated or garbage: its header runs past the file's {size} bytes; download it again"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is garbage: a string in its header is not UTF-8 ({error}); download it again"
        ) from None
    needed = max((tensor.stop for tensor in header.tensors.values()), default=0)
    if needed > size:
        raise InputError(
            f"{path} is truncated: its header claims {needed} bytes, the file has {size}; download it again"
        )
    return header


def _parse(path: Path, cursor: "_Cursor") -> GGUFHeader:
    num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, object] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = _field(path, cursor, key)
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalar("I")
        if name in infos or not 1 <= num_dims <= _MAX_DIMS:
            raise InputError(f"{path} is garbage: tensor {name} occurs twice or has {num_dims} axes; convert it again")
        dims = tuple(cursor.scalar("Q") for _ in range(num_dims))
        infos[name] = dims[::-1], cursor.scalar("I"), cursor.scalar("Q")
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise InputError(f"{path} is garbage: general.alignment is {alignment!r}; convert it again")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: GGUFTensor(_kind(path, name, number, shape), shape, data_start + offset)
        for name, (shape, number, offset) in infos.items()
    }
    return GGUFHeader(metadata, tensors)


def _field(path: Path, cursor: "_Cursor", key: str) -> object:
    number = cursor.scalar("I")
    if number == _STRING:
        return cursor.string()
    if number in _SCALARS:
        value = cursor.scalar(_SCALARS[number])
        # The shortest decimal is what was written: 1e-05, where widening gives 9.999999747378752e-06.
        return float(str(np.float32(value))) if number == _FLOAT32 else value
    if number == _ARRAY:
        item, count = cursor.scalar("I"), cursor.scalar("Q")
        if item == _STRING:
            return cursor.strings(count)
        if item in _SCALARS:
            return cursor.scalars(_SCALARS[item], count)
        number = item
    raise InputError(f"{path}: the metadata key {key} has type number {number}, which is not known; convert it again")


def _kind(path: Path, name: str, number: int, shape: tuple[int, ...]) -> GGMLQuantizationType:
    kind = next((kind for kind in READABLE_TYPES if kind == number), None)
    if kind is None:
        known = {int(kind): kind.name for kind in GGMLQuantizationType}
        readable = ", ".join(kind.name for kind in READABLE_TYPES)
        raise InputError(f"{path}: {name} has type {known.get(number, f'number {number}')}; readable are {readable}")
    block = GGML_QUANT_SIZES[kind][0]
    if shape[-1] % block or (block > 1 and len(shape) == 1):
        raise InputError(
            f"{path} is garbage: {name} of shape {list(shape)} cannot be stored in rows of {kind.name} blocks"
        )
    return kind


class _Cursor:
    """Reads little-endian values one after the other; running past the end raises EOFError or struct.error."""

    __slots__ = ("data", "offset")

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset

    def scalar(self, code: str) -> int:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self.data, self.offset)
        self.offset += layout.size
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Reads strings in one tight loop: a vocabulary has up to 262,144."""
        data, offset, unpack = self.data, self.offset, struct.Struct("<Q").unpack_from
        values: list[str] = []
        for _ in range(count):
            start = offset + 8
            offset = start + unpack(data, offset)[0]
            values.append(data[start:offset].decode())
        if offset > len(data):  # a slice past the end is silently short
            raise EOFError
        self.offset = offset
        return values

    def scalars(self, code: str, count: int) -> list[int]:
        dtype = np.dtype(code).newbyteorder("<")
        raw = self.data[self.offset : self.offset + count * dtype.itemsize]
        if len(raw) < count * dtype.itemsize:
            raise EOFError
        self.offset += len(raw)
        return np.frombuffer(raw, dtype).tolist()
