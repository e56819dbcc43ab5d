"""A server with OpenAI's API, asked with streams: one request -> when its pieces came. Knows HTTP; no figures."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from jaxllm.bench.http_stream import HttpError, HttpStreams
from jaxllm.bench.serve_args import BACKENDS, ServeBenchArgs
from jaxllm.bench.workloads import WorkloadRequest
from jaxllm.config.errors import InputError

_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money"),
)  # one token each in most vocabularies


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []  # msgspec gives each its own
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Record:
    """What became of one request; times are seconds since the run began, one for each piece of output that came."""

    sent: float
    planned: float  # when it was to be sent
    times: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


@asynccontextmanager
async def connect(args: ServeBenchArgs) -> AsyncIterator["Server"]:
    """Opens a client, and finds out the model's name.

    Raises:
        InputError: the server does not answer, or serves nothing of that kind.
    """
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | args.headers()
    async with httpx.AsyncClient(headers=headers, timeout=60.0) as http:
        await _wait_until_ready(http, args)
        model = args.model or await _first_model(http, args)
    headers |= {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    with contextlib.closing(HttpStreams(args.url, headers, args.timeout)) as streams:
        yield Server(streams, args, model)


class Server:
    """Sends requests to one route of a server."""

    def __init__(self, streams: HttpStreams, args: ServeBenchArgs, model: str):
        self.model = model
        self._streams = streams
        self._args = args
        self._is_chat = BACKENDS[args.backend].endswith("chat/completions")

    async def send(self, request: WorkloadRequest, planned: float, began: float) -> Record:
        """Streams one answer. What goes wrong stands in the record."""
        content = msgspec.json.encode(self._body(request))
        record = Record(sent=time.perf_counter() - began, planned=planned, num_prompt_tokens=len(request.prompt))
        answer = _Answer(record, began)
        try:
            status, refusal = await self._streams.post(content, answer.take)
        except HttpError as error:
            record.error = answer.error or str(error)
        else:
            record.error = answer.end() if status == 200 else f"HTTP {status}: {_said(refusal)}"
        return record

    async def fitting_vocabulary(self, size: int) -> int:
        """Gives below what token ids may be: `size`, or else the largest power of 2 of which the server takes them.

        Raises:
            InputError: the server takes no request at all.
        """
        error = None
        for limit in (size, *(1 << power for power in range(16, 7, -1) if 1 << power < size)):
            error = (await self.send(WorkloadRequest([limit - 1], 1), 0.0, time.perf_counter())).error
            if error is None:
                return limit
            if not error.startswith("HTTP 400"):
                break
        raise InputError(f"{self._args.url} takes no request: {error}")

    def _body(self, request: WorkloadRequest) -> Mapping[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.output_len, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._is_chat:
            text = " ".join([_WORDS[token % len(_WORDS)] for token in request.prompt])
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = request.prompt
        if self._args.temperature is not None:
            body["temperature"] = self._args.temperature
        if self._args.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **(self._args.extra_body or {})}

    @property
    def takes_token_ids(self) -> bool:
        """Says whether prompts are token ids, not words."""
        return not self._is_chat


class _Answer:
    """Reads the events of one answer as their bytes come."""

    def __init__(self, record: Record, began: float):
        self.error: str | None = None
        self._record = record
        self._began = began
        self._rest = b""
        self._usage: _Usage | None = None
        self._is_whole = False

    def take(self, data: bytes, came: float) -> None:
        """Notes when output comes, its usage, and what went wrong."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            line = line[5:].strip()
            if line == b"[DONE]":
                self._is_whole = True
                continue
            try:
                chunk = _decode(line)
            except msgspec.MsgspecError as error:
                self.error = self.error or f"the stream has an event that is no chunk of an answer: {error}"
                continue
            if chunk.error is not None:
                self.error = self.error or f"the answer broke off: {_message(chunk.error)}"
            self._usage = chunk.usage or self._usage
            if any(map(_has_output, chunk.choices)):
                self._record.times.append(came - self._began)

    def end(self) -> str | None:
        """Counts the tokens of a whole answer; else gives what went wrong."""
        record, usage = self._record, self._usage
        if self.error is not None or not self._is_whole or not record.times:
            broken = "the answer has no output" if self._is_whole else "the stream ended before the answer was whole"
            return self.error or broken
        record.num_output_tokens = len(record.times)
        if usage is not None:
            record.num_output_tokens = usage.completion_tokens or len(record.times)
            record.num_prompt_tokens = usage.prompt_tokens or record.num_prompt_tokens
        return None


def _has_output(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


async def _wait_until_ready(http: httpx.AsyncClient, args: ServeBenchArgs) -> None:
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            response = await http.get(f"{args.root}/v1/models")
            if response.status_code < 500:
                return
            cause = f"answers {response.status_code}: {_said(response.content)}"
        except httpx.HTTPError as error:
            cause = f"cannot be reached ({type(error).__name__}: {error})".replace(": )", ")")
        if time.monotonic() > deadline:
            raise InputError(
                f"{args.root} {cause}: start a server with `jaxllm serve`, or name another with base_url or port"
            )
        await asyncio.sleep(0.5)


async def _first_model(http: httpx.AsyncClient, args: ServeBenchArgs) -> str:
    response = await http.get(f"{args.root}/v1/models")
    try:
        names = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        names = []
    if not names:
        said = "" if response.is_success else f" (it answers {response.status_code}: {_said(response.content)})"
        raise InputError(f"{args.root}/v1/models lists no model{said}: name one with model=")
    return names[0]


def _said(content: bytes) -> str:
    """The message of OpenAI's error, or what stands in its place."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        return _one_line(content.decode(errors="replace"))
    return _message(body.get("error", body) if isinstance(body, dict) else body)


def _message(error: object) -> str:
    return _one_line(error.get("message") or error.get("detail") or error if isinstance(error, dict) else error)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
