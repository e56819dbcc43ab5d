"""The decorator of the small values made for every request in every step. Knows no fields, only how they are stored."""

from dataclasses import dataclass
from typing import Any, dataclass_transform

# Makes a record whose fields the caller fills in itself: 0.15 µs instead of 0.25. For the two loops of every step only.
blank: Any = object.__new__


@dataclass_transform(frozen_default=True)
def record[T](cls: type[T]) -> type[T]:
    """Makes a dataclass with slots that the type checker holds to be frozen.

    Frozen at run time as well, it would take four times as long to make (1.1 µs against 0.26 µs for five fields), and a
    step makes two for every running request.
    """
    return dataclass(slots=True)(cls)
