"""What an engine and the fronts of other processes say to each other, and its bytes. Knows messages; no sockets.

Plain data only, as between the processes of one engine (processes/messages.py). The tokens of a step travel as two
lists: that is what most updates are, and a step makes one for every running request.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import msgspec

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.messages import AbortRequests, AddRequest, EngineCall, EngineReply, EngineStats, Message
from jaxllm.engine.scores import RequestScores
from jaxllm.scheduler.request import RequestUpdate, WeightVersion


class Add(msgspec.Struct, tag="add", array_like=True):
    """Run a prompt."""

    request: AddRequest


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """End these samples."""

    request_ids: tuple[str, ...]


class Call(msgspec.Struct, tag="call", array_like=True):
    """Call a method of the engine."""

    call: EngineCall


class TokenizerParts(msgspec.Struct):
    """What a tokenizer is made of; `backend` is its tokenizer.json."""

    backend: str
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    tool_chat_template: str | None
    named_chat_templates: dict[str, str]


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine takes requests at an address, the n-th since the server's start; and what a front must know of it."""

    generation: int
    limits: dict[str, Any]
    processors: dict[str, dict[str, Any]]  # the defaults of each one's parameters
    sampling_defaults: dict[str, Any]
    tokenizer: TokenizerParts | None


class News(msgspec.Struct, tag="news", array_like=True):
    """What a step brought: a token for each of `names`, all other updates in full, and replies to calls."""

    weight_version: int | str
    names: list[str]
    tokens: list[int]
    updates: list[RequestUpdate]
    replies: list[EngineReply]
    stats: EngineStats


class Status(msgspec.Struct, tag="status", array_like=True):
    """The engine as it stands; `hanging` names a step that does not return."""

    stats: EngineStats
    hanging: str | None
    is_compiled: bool


class Overrun(msgspec.Struct, tag="overrun", array_like=True):
    """The front read nothing for so long that its requests were given up."""


class Died(msgspec.Struct, tag="died", array_like=True):
    """The engine's process ended, and is started again."""

    line: str


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """There is no engine any more, for a reason."""

    line: str


type ToEngine = Add | Abort | Call
type ToFront = Ready | News | Status | Overrun | Died | Ended


def encode(message: ToEngine | ToFront) -> bytes:
    """Gives a message's bytes."""
    return _encoder.encode(message)


def decode_to_engine(content: bytes) -> Message:
    """Reads a message of a front.

    Raises:
        ValueError: these are no bytes of one.
    """
    message = _to_engine.decode(content)
    if isinstance(message, Add):
        return message.request
    return AbortRequests(message.request_ids) if isinstance(message, Abort) else message.call


def decode_to_front(content: bytes) -> ToFront:
    """Reads a message of an engine.

    Raises:
        ValueError: these are no bytes of one.
    """
    return _to_front.decode(content)


def as_wire(message: Message) -> ToEngine:
    """Gives a front's message as it travels."""
    match message:
        case AddRequest():
            return Add(message)
        case AbortRequests():
            return Abort(message.request_ids)
        case EngineCall():
            return Call(message)


def news_of(updates: Iterable[RequestUpdate], replies: list[EngineReply], stats: EngineStats) -> News:
    """Sorts what a step brought."""
    version: WeightVersion | None = None
    names: list[str] = []
    tokens: list[int] = []
    rest: list[RequestUpdate] = []
    for update in updates:
        if (
            update.num_output_tokens > 1  # the first tells more
            and update.finish_reason is None
            and update.scores is None
            and len(update.token_ids) == 1
            and (version is None or update.weight_version == version)
        ):
            version = update.weight_version
            names.append(update.request_id)
            tokens.append(update.token_ids[0])
        else:
            rest.append(update)
    return News(0 if version is None else version, names, tokens, rest, replies, stats)


def read_updates(news: News) -> list[RequestUpdate]:
    """Gives the updates of a step again; what no front looks at is left out."""
    version = news.weight_version
    updates = [
        RequestUpdate(name, (token,), weight_version=version)
        for name, token in zip(news.names, news.tokens, strict=True)
    ]
    for update in news.updates:
        if update.scores is not None:
            update.scores = msgspec.convert(update.scores, RequestScores)  # pyright: ignore[reportAttributeAccessIssue]
        updates.append(update)
    return updates


def plain_limits(limits: EngineLimits) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Gives limits as plain data, and apart from them what the logits processors let a request say."""
    plain = {field.name: getattr(limits, field.name) for field in fields(limits) if field.name != "processors"}
    defaults = {
        name: {key: getattr(value, "tolist", lambda value=value: value)() for key, value in each.parameters.items()}
        for name, each in limits.processors.items()
    }
    return plain, defaults


def read_limits(ready: Ready) -> EngineLimits:
    """Gives limits as a front checks requests against them; its logits processors run in the engine alone."""
    plain: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in ready.limits.items()
    }
    processors = {
        name: LogitsProcessor(function=_runs_elsewhere, parameters=defaults)
        for name, defaults in ready.processors.items()
    }
    return EngineLimits(**plain, processors=processors)


def _runs_elsewhere(*_: object) -> Any:
    raise AssertionError("a front samples nothing")


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine.__value__)
_to_front = msgspec.msgpack.Decoder(ToFront.__value__)
