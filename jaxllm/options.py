"""Frozen dataclasses of flags -> options of an argument parser, so that a flag has its name and help in one place.

Knows types, spellings and defaults; no flag's meaning.
"""

import argparse
import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxllm.config.errors import InputError

_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)")
_FACTORS = {"": 1, **{unit: 1000**power for power, unit in enumerate("kmgt", 1)}}
_FACTORS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}

# vLLM's short spellings.
_SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "quantization": "-q",
}


class OptionParser(argparse.ArgumentParser):
    """Takes whole flag names only, with dashes or underscores, and answers a mistake with one line."""

    def __init__(self, **settings: Any):
        super().__init__(allow_abbrev=False, formatter_class=_WideHelp, **settings)

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Gives the values of the flags that were given.

        Raises:
            InputError: an unknown flag (the nearest known one is suggested), or a malformed value.
        """
        known, unknown = self.parse_known_args([_with_dashes(argument) for argument in arguments])
        if unknown:
            self._refuse(unknown[0])
        return vars(known)

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            raise InputError(f"{argument!r} belongs to no flag")
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        raise InputError(f"unknown flag {name}{f'; did you mean {near[0]}?' if near else ''}")


def add_options(parser: OptionParser, flags: type, title: str) -> None:
    """Adds a flag for each field of a dataclass; a flag that is not given is not among the parsed values."""
    kinds = typing.get_type_hints(flags)
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(flags):
        help = field.metadata["help"]
        if field.default not in (None, False, "", ()):
            shown = " ".join(field.default) if isinstance(field.default, tuple) else field.default
            help += f" [{'on' if shown is True else shown}]"
        _add(group, field.name, kinds[field.name], help.replace("%", "%%"))


def add_hidden_options(parser: OptionParser, neutral_values: Mapping[str, object]) -> None:
    """Adds flags that exist only to be refused; the value that asks for nothing tells the type."""
    for name, value in neutral_values.items():
        _add(parser, name, str if value is None else type(value), argparse.SUPPRESS)


def as_flag(name: str) -> str:
    """Spells a field's name as the command line does."""
    return "--" + name.replace("_", "-")


def name_flags(message: str, names: frozenset[str]) -> str:
    """Spells the fields that a message names as flags; a plain word such as model is one only before an equals sign."""

    def spelled(match: re.Match[str]) -> str:
        name = match[0]
        is_field = name in names and ("_" in name or message.startswith("=", match.end()))
        return as_flag(name) if is_field else name

    return re.sub(r"(?<![\w./'-])[a-z]\w*(?!/)", spelled, message)


def parse_size(text: str) -> int:
    """Reads 4096, 4k (4000), 4K (4096), 1.5m, 2G: small letters are powers of 1000, capitals of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        size = (float if "." in match[1] else int)(match[1]) * _FACTORS[match[2]]
        if size == int(size):
            return int(size)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a whole number; sizes may end in k, m, g (1000s) or K, M, G (1024s)"
    )


def parse_json_object(text: str) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is no JSON object: write it as '{{\"key\": value}}'")
    return value


def parse_size_or_auto(text: str) -> int | None:
    """Reads a size; `auto` leaves the choice to the engine."""
    return None if text == "auto" else parse_size(text)


class _WideHelp(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=36)


class _Names(argparse.Action):
    """Keeps several values as a tuple; vLLM's spelling of them as one JSON list is read too."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if len(values) == 1 and values[0].startswith("["):
            try:
                values = [str(value) for value in json.loads(values[0])]
            except json.JSONDecodeError:
                raise argparse.ArgumentError(self, f"{values[0]!r} is no JSON list") from None
        setattr(namespace, self.dest, tuple(values))


def _add(group: Any, name: str, kind: Any, help: str) -> None:
    spellings = [as_flag(name), *([_SHORT[name]] if name in _SHORT else [])]
    settings: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help}
    is_optional = type(None) in typing.get_args(kind)
    plain = next(each for each in typing.get_args(kind) if each is not type(None)) if is_optional else kind
    if plain is bool:
        settings["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(kind) is tuple:
        settings |= {"action": _Names, "nargs": "+", "metavar": "NAME"}
    elif typing.get_origin(plain) is Mapping:
        settings |= {"type": parse_json_object, "metavar": "JSON"}
    elif plain is int:
        settings |= {"type": parse_size_or_auto if is_optional else parse_size, "metavar": "SIZE"}
    elif plain is float:
        settings |= {"type": float, "metavar": "NUMBER"}
    else:
        settings["metavar"] = "TEXT"
    group.add_argument(*spellings, **settings)


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
