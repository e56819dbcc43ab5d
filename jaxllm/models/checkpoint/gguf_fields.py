"""Typed access to GGUF metadata: a missing or mistyped key becomes one line. Knows no model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxllm.config.errors import InputError


@dataclass(frozen=True, slots=True)
class GGUFFields:
    """The metadata of one file. Keys that don't start with `general.` or `tokenizer.` belong to the architecture."""

    path: Path
    architecture: str
    metadata: Mapping[str, object]

    def find(self, key: str) -> object | None:
        """Gives the value, or None; of a list with one value per layer, all equal, that value."""
        value = self.metadata.get(self._full(key))
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            return value[0]
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Gives a whole number."""
        value = self._found(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._mistyped(key, value, "a whole number")
        return value

    def optional_integer(self, key: str) -> int | None:
        """Gives a whole number, or None where the file has none."""
        return None if self.find(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Gives a finite number."""
        value = self._found(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._mistyped(key, value, "a number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Gives a number, or None where the file has none."""
        return None if self.find(key) is None else self.number(key)

    def _full(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"

    def _found(self, key: str, default: object) -> object:
        value = self.find(key)
        if value is None and default is None:
            raise InputError(f"{self.path} lacks the metadata key {self._full(key)}: convert the model again")
        return default if value is None else value

    def _mistyped(self, key: str, value: object, wanted: str) -> InputError:
        return InputError(f"{self.path}: the metadata key {self._full(key)} is {str(value)[:40]!r}, not {wanted}")
