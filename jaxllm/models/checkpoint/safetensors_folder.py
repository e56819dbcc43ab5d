"""A folder as model hubs publish it: config.json and safetensors files. Knows no model, and parses no tokenizer.

The safetensors package is not used to read: its numpy side has no bfloat16 slices, and it maps whole files, whose pages
stay resident while it holds them.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.file_bytes import map_bytes, map_columns, open_error
from jaxllm.models.checkpoint.safetensors_header import DTYPES, StoredTensor, read_header
from jaxllm.models.checkpoint.source import check_columns, check_rows, lookup

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """The checkpoint in a folder: one model.safetensors, or shards and their index, or any *.safetensors.

    Raises:
        InputError: a file is missing, unreadable, truncated or garbage.
    """

    format = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder")
        if not (folder / "config.json").exists():
            raise InputError(f"{folder} has no config.json: name the folder that holds it beside the weights")
        self.config: dict[str, Any] = read_json_object(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json_object(generation) if generation.exists() else {}
        self._tensors = _find_tensors(folder)

    def names(self) -> Iterable[str]:
        """Lists the tensors in the order of the files."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Gives the shape of the whole tensor."""
        return lookup(self._tensors, name, self.path).shape

    def dtype(self, name: str) -> np.dtype:
        """Gives the dtype in the file, which is what `read` returns."""
        tensor = lookup(self._tensors, name, self.path)
        if tensor.type_name not in DTYPES:
            raise InputError(f"{tensor.path}: {name} has type {tensor.type_name}, readable are {', '.join(DTYPES)}")
        return DTYPES[tensor.type_name]

    def read(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Shows rows start:stop of the file, or columns of them, read-only and without a copy."""
        dtype, tensor = self.dtype(name), lookup(self._tensors, name, self.path)
        num_rows, *row_shape = tensor.shape or (1,)
        check_rows(name, num_rows, start, stop)
        row_bytes = (tensor.stop - tensor.start) // max(num_rows, 1)
        if columns is not None and start < stop:
            check_columns(name, tensor.shape, columns)
            first, last = (column * dtype.itemsize for column in columns)
            table = map_columns(tensor.path, tensor.start + start * row_bytes, stop - start, row_bytes, first, last)
            # A copy where values are not aligned: headers of old writers have any length.
            return table.view(dtype) if tensor.start % dtype.itemsize == 0 else table.copy().view(dtype)
        raw = map_bytes(tensor.path, tensor.start + start * row_bytes, tensor.start + stop * row_bytes)
        rows = raw.view(dtype).reshape(stop - start, *row_shape)
        return rows if rows.flags.aligned else rows.copy()  # headers of old writers have any length

    def tokenizer_fields(self) -> None:
        """Gives None: the folder holds the tokenizer's own files."""
        return


def _find_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / _SINGLE).exists():
        return read_header(folder / _SINGLE)
    if (folder / _INDEX).exists():
        return _indexed_tensors(folder, folder / _INDEX)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} has config.json but no *.safetensors{_other_weights(folder)}")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                raise InputError(f"{folder}: both {tensors[name].path.name} and {file.name} hold {name}: remove one")
            tensors[name] = tensor
    return tensors


def _indexed_tensors(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"{index} has no weight_map from tensor names to file names: download it again")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
    if missing:
        raise InputError(
            f"{index} names {len(shards)} shards, {len(missing)} of them missing ({missing[0]}): finish the download"
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise InputError(
                f"{index} places {name} in {shard}, which lacks it: index and shards don't belong together"
            )
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a file that must hold a JSON object.

    Raises:
        InputError: it can't be read, is not JSON, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise open_error(path, error) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _other_weights(folder: Path) -> str:
    """Names a file that the user may have meant."""
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return f": to load the GGUF file, name it ({gguf[0]})"
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    return f": {pickled[0].name} is a pickle, convert it to safetensors" if pickled else ": finish the download"
