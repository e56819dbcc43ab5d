"""Frozen dataclasses of flags -> options of an argument parser, so that a flag has its name and help in one place.

Knows types, spellings and defaults; no flag's meaning. option_help.py words `--help`, config_file.py reads files.
"""

import argparse
import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxllm.config.errors import InputError
from jaxllm.config_file import read_config
from jaxllm.flag_groups import describe_group, group_of
from jaxllm.option_help import Section, help_text, show

_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)([kKmMgGtT]?)")
_FACTORS = {"": 1, **{unit: 1000**power for power, unit in enumerate("kmgt", 1)}}
_FACTORS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}

POSITIONAL = "positional arguments"  # the title of their group
POSITIONAL_MODEL = "positional_model"

# vLLM's short spellings.
_SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
    "prefill_context_parallel_size": "-pcp",
    "decode_context_parallel_size": "-dcp",
    "compilation_config": "-cc",
    "attention_config": "-ac",
    "nnodes": "-n",
    "node_rank": "-r",
    "enable_expert_parallel": "-ep",
    "quick": "-q",  # of chat and complete
    "quantization": "-q",
    "input_file": "-i",
    "output_file": "-o",
}


class OptionParser(argparse.ArgumentParser):
    """Takes whole flag names only, with dashes or underscores, and answers a mistake with one line.

    `own` names the groups that a plain `--help` shows in full; the others it only lists.
    """

    def __init__(self, *, own: Sequence[str] = (), **settings: Any):
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=_WideHelp, **settings)
        self.own = own
        self.groups: dict[str, Any] = {}
        self.neutral_values: dict[str, object] = {}  # of the flags that are no field

    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))

    def group(self, title: str) -> Any:
        """Gives the group of this title, made at its first use."""
        if title not in self.groups:
            self.groups[title] = self.add_argument_group(title, describe_group(title) or None)
        return self.groups[title]

    def names(self) -> frozenset[str]:
        """Lists the fields that the flags stand for."""
        return frozenset(action.dest for action in self._actions)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Gives the values of the flags that were given, those of a `--config` file among them; typed ones win.

        Raises:
            InputError: an unknown flag (the nearest known one is suggested), or a malformed value.
            SystemExit: help was asked for, and shown.
        """
        arguments = [_with_dashes(argument) for argument in arguments]
        self._answer_help(arguments)
        path, arguments = _take_config(arguments)
        typed = self._parse(arguments)
        if path is None:
            return typed
        spelled = read_config(path, self._option_string_actions, self._is_switch)
        try:
            filed = self._parse(spelled)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if POSITIONAL_MODEL in typed:
            filed.pop("model", None)
        return filed | typed

    def _parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        known, unknown = self.parse_known_args(arguments)
        if unknown:
            self._refuse(unknown[0])
        return vars(known)

    def _is_switch(self, flag: str) -> bool:
        return self._option_string_actions[flag].nargs == 0

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            raise InputError(f"{argument!r} belongs to no flag")
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        raise InputError(f"unknown flag {name}{f'; did you mean {near[0]}?' if near else ''}")

    def _answer_help(self, arguments: Sequence[str]) -> None:
        asked = [argument for argument in arguments if argument in ("-h", "--help") or argument.startswith("--help=")]
        if not asked:
            return
        topic = asked[0].partition("=")[2]
        sections = [Section(title, self._rendered(title), title in self.own) for title in self.groups]
        show(help_text(self._head(), sections, topic, self.neutral_values), paged=topic == "page")
        raise SystemExit(0)

    def _head(self) -> str:
        return f"usage: {self.usage or self.prog}\n\n{self.description or ''}"

    def _rendered(self, title: str) -> tuple[str, dict[str, str]]:
        """A group as text, and each of its flags with its spellings as text of its own."""
        group, entries = self.groups[title], {}
        for action in group._group_actions:
            if action.help != argparse.SUPPRESS:
                for spelling in action.option_strings or [str(action.metavar)]:
                    entries[spelling] = self._formatted(None, None, [action])
        return self._formatted(title, group.description, group._group_actions), entries

    def _formatted(self, title: str | None, text: str | None, actions: Sequence[argparse.Action]) -> str:
        formatter = self._get_formatter()
        formatter.start_section(title)
        formatter.add_text(text)
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help()


def add_options(
    parser: OptionParser, flags: type, title: str, *, grouped: bool = False, without: Collection[str] = ()
) -> None:
    """Adds a flag for each field of a dataclass; a flag that is not given is not among the parsed values.

    `grouped` puts each under vLLM's group for it, and only those that have none under `title`.
    """
    kinds = typing.get_type_hints(flags)
    for field in dataclasses.fields(flags):
        if field.name in without or "help" not in field.metadata:  # fields without one are for Python programs
            continue
        help = field.metadata["help"]
        if field.default not in (None, False, "", ()):
            shown = " ".join(field.default) if isinstance(field.default, tuple) else field.default
            help += f" [{'on' if shown is True else shown}]"
        group = parser.group(group_of(field.name, title) if grouped else title)
        _add(group, field.name, kinds[field.name], help.replace("%", "%%"))


def add_hidden_options(parser: OptionParser, neutral_values: Mapping[str, object]) -> None:
    """Adds flags that exist only to be refused, or to be taken without effect; the value beside one tells its type."""
    parser.neutral_values |= neutral_values
    for name, value in neutral_values.items():
        kind = str if value is None else tuple[str, ...] if value == () else type(value)
        _add(parser, name, kind, argparse.SUPPRESS)


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
    short = _SHORT.get(name)
    is_free = short is not None and short not in group._option_string_actions
    spellings = [as_flag(name), *([short] if is_free else [])]
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


def _take_config(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Takes `--config FILE` out of the arguments; all other values override those of the file."""
    path, rest, left = None, [], iter(arguments)
    for argument in left:
        flag, equals, value = argument.partition("=")
        if flag != "--config":
            rest.append(argument)
            continue
        if path is not None:
            raise InputError("--config is given twice: put all flags into one file")
        path = value if equals else next(left, "")
        if not path:
            raise InputError("--config: expected the path of a YAML file")
    return path, rest


def add_model_argument(parser: OptionParser) -> None:
    """Lets the model stand first, without its flag; `with_model` reads it."""
    parser.group(POSITIONAL).add_argument(
        POSITIONAL_MODEL, nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="the same as --model"
    )


def with_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the values with the model under its own name, however it was given.

    Raises:
        InputError: two different models are given.
    """
    given = dict(values)
    positional = given.pop(POSITIONAL_MODEL, None)
    if positional is not None and given.setdefault("model", positional) != positional:
        raise InputError(f"two models are given, {positional!r} and model={given['model']!r}: keep one")
    return given
