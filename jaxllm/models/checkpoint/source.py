"""What a source of weights offers. Knows no file format, no model and no device."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxllm.config.errors import InputError


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names and in Hugging Face's layout, read a few rows at a time.

    Those of format "orbax" have the decoder's own names and layout.
    """

    format: str  # as in --load-format
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    def names(self) -> Iterable[str]:
        """Lists the tensors' Hugging Face names."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Gives the shape of the whole tensor."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Gives the dtype of what `read` returns."""
        ...

    def read(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Reads rows start:stop of axis 0, and no others; of a matrix, where columns are given, only these of them.

        The array may be read-only. A scalar has one row.
        """
        ...

    def tokenizer_fields(self) -> Mapping[str, object] | None:
        """Gives the tokenizer's metadata where the weights' file holds them; None where it has files of its own."""
        ...


def lookup[T](tensors: Mapping[str, T], name: str, path: Path) -> T:
    """Finds a tensor by name, or says that the checkpoint lacks it."""
    if name not in tensors:
        raise InputError(
            f"{path} has no tensor {name} among its {len(tensors)}: config and weights don't belong together"
        )
    return tensors[name]


def check_rows(name: str, num_rows: int, start: int, stop: int) -> None:
    """Refuses rows that the tensor doesn't have: a caller's bug, not a user's mistake."""
    if not 0 <= start <= stop <= num_rows:
        raise IndexError(f"rows {start}:{stop} of {name}, which has {num_rows}")


def check_columns(name: str, shape: tuple[int, ...], columns: tuple[int, int]) -> None:
    """Refuses columns that the tensor doesn't have, likewise."""
    if len(shape) != 2 or not 0 <= columns[0] < columns[1] <= shape[1]:
        raise IndexError(f"columns {columns[0]}:{columns[1]} of {name}, whose shape is {list(shape)}")
