"""A folder that `jaxllm convert` wrote: config.json and the decoder's own arrays, stored with orbax. Knows no model.

The arrays lie in DIR/weights, unsplit and each layer's by itself, under the decoder's own names and in its layout.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config.errors import InputError
from jaxllm.models.checkpoint.file_bytes import open_error
from jaxllm.models.checkpoint.safetensors_folder import read_json_object
from jaxllm.models.checkpoint.source import check_columns, check_rows, lookup

TOKENIZER_FIELDS = "tokenizer_fields.json"  # of a GGUF file, which holds no tokenizer files
_WEIGHTS = "weights"
_METADATA = "_METADATA"  # orbax writes it last of all but its mark of success
_CHUNK_BYTES = 64 << 20
_HELD_BYTES = 256 << 20


def is_orbax_folder(folder: Path) -> bool:
    """Tells a folder whose weights were stored with orbax."""
    return (folder / _WEIGHTS / _METADATA).is_file()


class OrbaxFolder:
    """The checkpoint in such a folder.

    Arrays are read whole, a few at a time: those that are named alike but for the layer, in the order of the layers.
    They are dropped with the first row of any other. So a reader who takes layer after layer of one parameter after the
    other reads each byte once, for however many devices.

    Raises:
        InputError: a file is missing, unreadable or garbage.
    """

    format = "orbax"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config: dict[str, Any] = read_json_object(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config: dict[str, Any] = read_json_object(generation) if generation.exists() else {}
        self._arrays = dict(sorted(_list_arrays(folder).items(), key=lambda item: _place_of(item[0])))
        self._held: dict[str, np.ndarray] = {}

    def names(self) -> Iterable[str]:
        """Lists the arrays: the keys that lead to each, joined by dots."""
        return self._arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Gives the shape of the whole array."""
        return tuple(lookup(self._arrays, name, self.path).shape)

    def dtype(self, name: str) -> np.dtype:
        """Gives the dtype in which it is stored, which is what `read` returns."""
        return np.dtype(lookup(self._arrays, name, self.path).dtype)

    def read(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Shows rows start:stop, or columns of them: all axes behind the first count as one."""
        shape = self.shape(name)
        check_rows(name, shape[0], start, stop)
        array = self._whole(name)
        if columns is None:
            return array[start:stop]
        table = array.reshape(shape[0], -1)
        check_columns(name, table.shape, columns)
        return table[start:stop, slice(*columns)]

    def tokenizer_fields(self) -> Mapping[str, object] | None:
        """Gives the metadata of the GGUF file that was converted; None where there are the tokenizer's own files."""
        fields = self.path / TOKENIZER_FIELDS
        return read_json_object(fields) if fields.is_file() else None

    def release(self) -> None:
        """Drops the arrays that were read last."""
        self._held = {}

    def _whole(self, name: str) -> np.ndarray:
        if name not in self._held:
            self._held = {}  # before others are read
            self._held = _read_arrays(self.path, self._following(name))
        return self._held[name]

    def _following(self, name: str) -> list[str]:
        """The array and those behind it that are named alike, as many as may be held."""
        names, size = list(self._arrays), 0
        found = []
        for other in names[names.index(name) :]:
            size += math.prod(self.shape(other)) * self.dtype(other).itemsize
            if found and (size > _HELD_BYTES or _place_of(other)[0] != _place_of(name)[0]):
                break
            found.append(other)
        return found


def _place_of(name: str) -> tuple[str, int]:
    """The name without its layer's number, and the number."""
    number = re.search(r"\.(\d+)\.", name)
    return (name, 0) if number is None else (name.replace(number[0], ".", 1), int(number[1]))


def write_orbax(folder: Path, arrays: Mapping[str, Any], config: Mapping, generation_config: Mapping) -> None:
    """Writes arrays, by their dotted names, and both configurations into a folder.

    Raises:
        InputError: the folder cannot be written.
    """
    import orbax.checkpoint as ocp  # seconds, which no other format needs

    tree = _nested(arrays)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, values in (("config.json", config), ("generation_config.json", generation_config)):
            if values or file == "config.json":
                (folder / file).write_text(json.dumps(values, indent=2, default=_plain) + "\n")
        with ocp.PyTreeCheckpointer() as checkpointer:
            save = ocp.args.PyTreeSave(tree, save_args=_save_args(ocp, tree))
            checkpointer.save(folder.absolute() / _WEIGHTS, args=save)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}") from None


def _save_args(ocp: Any, tree: dict[str, Any]) -> dict[str, Any]:
    """Large arrays are stored in parts, which are read at the same time."""
    return {
        key: _save_args(ocp, branch) if isinstance(branch, dict) else ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES)
        for key, branch in tree.items()
    }


def _plain(value: Any) -> Any:
    """A configuration's value as JSON has it."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _list_arrays(folder: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(folder.absolute() / _WEIGHTS).item_metadata
        except OSError as error:
            raise open_error(folder / _WEIGHTS, error) from None
        except Exception as error:  # whatever is wrong with a file
            raise InputError(_damaged(folder, error)) from None
    if metadata is None:
        raise InputError(_damaged(folder, EOFError("orbax finds no arrays, or files of them are truncated")))
    return dict(_flat(metadata.tree, ""))


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, branch in tree.items():
        if isinstance(branch, Mapping):
            yield from _flat(branch, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", branch


def _read_arrays(folder: Path, names: list[str]) -> dict[str, np.ndarray]:
    import orbax.checkpoint as ocp

    item = _nested(dict.fromkeys(names, 0))
    wanted = _nested({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})
    with ocp.PyTreeCheckpointer() as checkpointer:
        restore = ocp.args.PyTreeRestore(item=item, restore_args=wanted, partial_restore=True)
        try:
            tree = checkpointer.restore(folder.absolute() / _WEIGHTS, args=restore)
        except Exception as error:  # whatever is wrong with a file
            raise InputError(_damaged(folder, error)) from None
    return dict(_flat(tree, ""))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _damaged(folder: Path, error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{folder / _WEIGHTS} cannot be read: {type(error).__name__}: {said:.200}; convert the model again"
