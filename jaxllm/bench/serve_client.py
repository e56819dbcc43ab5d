"""A server with OpenAI's API, asked with streams: one request -> when its pieces came. Knows HTTP; no figures."""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

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
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}) | args.headers()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(args.timeout, connect=60.0)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout) as http:
        await _wait_until_ready(http, args)
        yield Server(http, args, args.model or await _first_model(http, args))


class Server:
    """Sends requests to one route of a server."""

    def __init__(self, http: httpx.AsyncClient, args: ServeBenchArgs, model: str):
        self.model = model
        self._http = http
        self._args = args
        self._is_chat = BACKENDS[args.backend].endswith("chat/completions")

    async def send(self, request: WorkloadRequest, planned: float, began: float) -> Record:
        """Streams one answer. What goes wrong stands in the record."""
        content = msgspec.json.encode(self._body(request))
        headers = {"Content-Type": "application/json"}
        record = Record(sent=time.perf_counter() - began, planned=planned, num_prompt_tokens=len(request.prompt))
        try:
            async with self._http.stream("POST", self._args.url, content=content, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    record.error = f"HTTP {response.status_code}: {_said(response)}"
                else:
                    record.error = await _follow(response, record, began)
        except httpx.HTTPError as error:
            record.error = f"{type(error).__name__}: {error}".rstrip(": ")
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


async def _follow(response: httpx.Response, record: Record, began: float) -> str | None:
    """Notes when pieces of output come; gives what went wrong."""
    usage = None
    async for data, came in _events(response):
        if data == b"[DONE]":
            break
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError as error:
            return f"the stream has an event that is no chunk of an answer: {error}"
        if chunk.error is not None:
            said = chunk.error.get("message", chunk.error) if isinstance(chunk.error, dict) else chunk.error
            return f"the answer broke off: {_one_line(said)}"
        usage = chunk.usage or usage
        if any(map(_has_output, chunk.choices)):
            record.times.append(came - began)
    else:
        return "the connection ended before the answer was whole"
    if not record.times:
        return "the answer has no output"
    record.num_output_tokens = len(record.times)
    if usage is not None:
        record.num_output_tokens = usage.completion_tokens or len(record.times)
        record.num_prompt_tokens = usage.prompt_tokens or record.num_prompt_tokens
    return None


def _has_output(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


async def _events(response: httpx.Response) -> AsyncGenerator[tuple[bytes, float]]:
    """Yields the data of each server-sent event and when it came."""
    rest = b""
    async for piece in response.aiter_raw():
        came = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), came


async def _wait_until_ready(http: httpx.AsyncClient, args: ServeBenchArgs) -> None:
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            response = await http.get(f"{args.root}/v1/models")
            if response.status_code < 500:
                return
            cause = f"answers {response.status_code}: {_said(response)}"
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
        said = "" if response.is_success else f" (it answers {response.status_code}: {_said(response)})"
        raise InputError(f"{args.root}/v1/models lists no model{said}: name one with model=")
    return names[0]


def _said(response: httpx.Response) -> str:
    """The message of OpenAI's error, or what stands in its place."""
    try:
        body = response.json()
    except ValueError:
        return response.reason_phrase or _one_line(response.text)
    error = body.get("error", body) if isinstance(body, dict) else body
    return _one_line(error.get("message") or error.get("detail") or error if isinstance(error, dict) else error)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
