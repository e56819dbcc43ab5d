"""Renders chat messages through a model's Jinja template. Knows no tokenizer: what it gives is text."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxllm.config.errors import InputError

# Stands where the final message ends; the last character tells whether the template trims its messages.
_END_MARK = "\u2402end-of-final-message\u2402 "


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: object,
) -> str:
    """Renders messages as the model was trained to read them; other keywords become template variables.

    Raises:
        InputError: a malformed message or tool, or the template is broken or refuses the messages.
    """
    if continue_final_message and add_generation_prompt:
        raise InputError(
            "continue_final_message=True needs add_generation_prompt=False: a message is either new or continued"
        )
    chat = plain_messages(messages)
    if continue_final_message:
        chat[-1]["content"] += _END_MARK
    values = {
        **variables,
        "messages": chat,
        "tools": _plain_tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    compiled = _compile(template)
    try:
        text = compiled.render(values)
    except Exception as error:  # a template is the model's own program: any exception may leave it
        raise InputError(f"the chat template refuses these messages: {_one_line(error)}") from error
    return _cut_at_mark(text) if continue_final_message else text


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies messages into what templates expect: text as content, tool arguments as objects, no nulls."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise InputError("messages is empty: give at least one")
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"{where}.role must be a string such as 'user', got {role!r}")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _plain_content(where, role, message.get("content"))
    if "tool_calls" in plain:
        plain["tool_calls"] = _plain_calls(where, plain["tool_calls"])
    return plain


def _plain_content(where: str, role: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":  # a message of tool calls only
        return ""
    if not isinstance(content, Sequence):
        raise InputError(f"{where}.content must be a string or a list of text parts, got {type(content).__name__}")
    return "\n".join(_part_text(f"{where}.content[{index}]", part) for index, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise InputError(
            f"{where} must be an object such as {{'type': 'text', 'text': ...}}, got {type(part).__name__}"
        )
    if part.get("type") != "text":
        raise InputError(f"{where} has type {part.get('type')!r}: this model reads only parts of type 'text'")
    if not isinstance(part.get("text"), str):
        raise InputError(f"{where}.text must be a string, got {type(part.get('text')).__name__}")
    return part["text"]


def _plain_calls(where: str, calls: object) -> list[object]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise InputError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
    return [_plain_call(f"{where}.tool_calls[{index}]", call) for index, call in enumerate(calls)]


def _plain_call(where: str, call: object) -> object:
    """Parses the arguments, which clients send as a JSON string and templates write with `tojson`."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InputError(f"{where} must be an object with a function, got {call!r:.80}")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError as error:
            raise InputError(f"{where}.function.arguments is not JSON: {error}") from None
    return {**call, "function": function}


def _plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence | None):
        raise InputError(f"tools must be a list of JSON schemas, got {type(tools).__name__}")
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise InputError(f"tools[{index}] must be a JSON schema, got {type(tool).__name__}")
    return [dict(tool) for tool in tools] if tools else None


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise InputError(
            "continue_final_message=True, but the chat template does not write the final message: leave it off"
        )
    kept_spaces = text.startswith(_END_MARK, end)
    return text[:end] if kept_spaces else text[:end].rstrip()


@lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise InputError(
            f"the chat template is broken{f' in line {line}' if line else ''}: {_one_line(error)}"
        ) from None


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Builds the environment that templates are written for: that of transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    names: dict[str, Callable[..., object]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(names)
    environment.filters["tojson"] = _tojson
    return environment


class _GenerationTag(Extension):
    """Reads `{% generation %}`, by which a trainer finds what the assistant said; here it only holds its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes plain JSON, where Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
