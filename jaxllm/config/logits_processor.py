"""A user's own change of the logits, compiled into the sampler. Knows its function and its parameters; no device."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.config.errors import InputError

# What a function finds among its parameters besides its own: of the row, int32 scalars.
ROW_FACTS = ("position", "last_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessor:
    """A pure jax function of one row: (logits [V] float32, parameters) -> logits [V].

    `parameters` names the row's parameters with their defaults, whose shapes and types (integers or floats, 32 bits)
    are what a request may give. The function gets them in a dictionary, and beside them `position`, the index of the
    token to be chosen, prompt included, and `last_token`, the one before it. It is traced once and runs only for rows
    whose request asks for it by name: `SamplingParams(extra_args={"name": {"parameter": value}})`.

    Raises:
        InputError: a default is not a number or an array of numbers.
    """

    function: Callable[..., Any]
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, default in self.parameters.items():
            if name in ROW_FACTS:
                raise InputError(f"logits processor: the parameter name {name!r} is taken: every function gets it")
            as_words(name, default)

    def values(self, given: object) -> dict[str, np.ndarray]:
        """Gives all parameters of a request, 32 bits wide: what it gives, and the defaults of the others.

        Raises:
            InputError: an unknown parameter, or a value of another shape or type than the default's.
        """
        if not isinstance(given, Mapping):
            raise InputError(f"its parameters must be a dictionary, got {given!r:.60}")
        unknown = [name for name in given if name not in self.parameters]
        if unknown:
            known = ", ".join(self.parameters) or "none"
            raise InputError(f"unknown parameter {unknown[0]!r}; it has {known}")
        values = {}
        for name, default in self.parameters.items():
            expected = as_words(name, default)
            value = as_words(name, given.get(name, default))
            if expected.dtype == np.float32 and value.dtype == np.int32:
                value = value.astype(np.float32)
            if value.shape != expected.shape or value.dtype != expected.dtype:
                raise InputError(
                    f"{name} must be {_describe(expected)} as its default is, got {_describe(value)}: {value!r:.60}"
                )
            values[name] = value
        return values


def as_words(name: str, value: object) -> np.ndarray:
    """A number or an array of numbers as int32 or float32.

    Raises:
        InputError: it is neither.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal length
        array = np.asarray(None)
    if array.dtype.kind in "bui":
        return array.astype(np.int32)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    raise InputError(f"{name} must be a number or an array of numbers, got {value!r:.60}")


def load_processors(given: object) -> dict[str, LogitsProcessor]:
    """Gives processors by name, from a mapping of these or from "module:attribute" strings (the attribute names it).

    Raises:
        InputError: one of them is no LogitsProcessor, or its module cannot be imported.
    """
    if isinstance(given, Mapping):
        named: dict[str, Any] = dict(given)
    else:
        named = {path.rpartition(":")[2]: _import(path) for path in given or ()}  # pyright: ignore[reportGeneralTypeIssues]
    for name, processor in named.items():
        if not isinstance(processor, LogitsProcessor):
            raise InputError(f"logits_processors: {name!r} must be a jaxllm.LogitsProcessor, got {processor!r:.60}")
    return named


def _import(path: str) -> object:
    module, colon, attribute = path.rpartition(":")
    if not colon or not module or not attribute:
        raise InputError(f"logits_processors: {path!r} must be written module:attribute")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"logits_processors: {path!r} cannot be imported: {error}") from None


def _describe(array: np.ndarray) -> str:
    kind = "an integer" if array.dtype == np.int32 else "a number"
    return kind if array.shape == () else f"{array.dtype.name} of shape {array.shape}"
