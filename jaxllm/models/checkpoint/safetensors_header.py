"""Parses the header of one safetensors file. Knows neither folders nor configs, and reads no tensor."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.file_bytes import file_start, map_bytes, refuse_lfs_pointer

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of one file: its bytes are start:stop of the file."""

    path: Path
    type_name: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Lists the tensors of a safetensors file, all of whose bytes are there.

    Raises:
        InputError: the file is unreadable, is not safetensors, or is truncated.
    """
    prefix, size = file_start(path, 32)
    refuse_lfs_pointer(path, prefix)
    header_stop = 8 + int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or header_stop > size:
        raise InputError(
            f"{path} is truncated or not a safetensors file: its header claims to end at byte {header_stop}, "
            f"the file has {size}; download it again"
        )
    tensors = _parse(path, map_bytes(path, 8, header_stop).tobytes(), header_stop)
    needed = max((tensor.stop for tensor in tensors.values()), default=header_stop)
    if needed > size:
        raise InputError(
            f"{path} is truncated: its header claims {needed} bytes, the file has {size}; download it again"
        )
    return tensors


def _parse(path: Path, header: bytes, data_start: int) -> dict[str, StoredTensor]:
    try:
        entries = json.loads(header)
        return {name: _stored(path, entry, data_start) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} is not a safetensors file: its header of {len(header)} bytes is garbage ({error}); download again"
        ) from None


def _stored(path: Path, entry: dict, data_start: int) -> StoredTensor:
    type_name, shape = str(entry["dtype"]), tuple(int(axis) for axis in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if min((*shape, begin, end - begin)) < 0:
        raise ValueError(f"negative sizes in {entry}")
    dtype = DTYPES.get(type_name)
    if dtype is not None and math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{end - begin} bytes for a {type_name} tensor of shape {list(shape)}")
    return StoredTensor(path, type_name, shape, data_start + begin, data_start + end)
