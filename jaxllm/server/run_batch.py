"""`jaxllm run-batch`: a file of requests in OpenAI's batch format -> a file of answers, without a socket.

Knows lines of JSON; every request goes through the server's own routes. The line of an answer stands where the line of
its request does.
"""

import asyncio
import dataclasses
import json
import logging
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.config.engine_args import NOT_BUILT, EngineArgs, engine_args, flag
from jaxllm.config.errors import InputError
from jaxllm.config.server_args import ServerArgs
from jaxllm.config.writable import check_writable
from jaxllm.environment import prepare_environment
from jaxllm.options import OptionParser, add_hidden_options, add_model_argument, add_options, with_model

if TYPE_CHECKING:
    import httpx

URLS = ("/v1/chat/completions", "/v1/completions")
_USUAL_ROWS = 256  # max_num_seqs where the user leaves it to the engine
_UNDER_WAY = 4  # requests given to the engine for each row: enough that no row waits for one to come


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBatchArgs:
    """Flags of `run-batch`.

    Raises:
        InputError: a file is missing, cannot be written, or is both.
    """

    input_file: str | None = flag(None, "requests, one JSON object a line: custom_id, method, url, body")
    output_file: str | None = flag(None, "file to write answers to, a line for each request, in the same order")
    served_model_name: tuple[str, ...] = flag((), "names that requests may ask for; default: the model as given")
    response_role: str = flag("assistant", "role of the answers in a chat")
    enable_prompt_tokens_details: bool = flag(False, "tell in usage how many prompt tokens came from a cache")

    def __post_init__(self) -> None:
        for name, letter in (("input_file", "i"), ("output_file", "o")):
            if getattr(self, name) is None:
                raise InputError(f"{name} is missing: name it with -{letter} FILE")
        check_writable("output_file", self.output_file)
        if not self.source.is_file():
            raise InputError(f"input_file={self.input_file!r} cannot be read: there is no such file")
        if self.target.exists() and self.source.samefile(self.target):
            raise InputError(f"output_file={self.output_file!r} is the input file too: name another")

    @property
    def source(self) -> Path:
        return Path(self.input_file or "").expanduser()

    @property
    def target(self) -> Path:
        return Path(self.output_file or "").expanduser()

    def server_args(self) -> ServerArgs:
        """Gives what the server's routes want to know."""
        return ServerArgs(
            served_model_name=self.served_model_name,
            response_role=self.response_role,
            enable_prompt_tokens_details=self.enable_prompt_tokens_details,
        )


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_model_argument(parser)
    add_options(parser, RunBatchArgs, "run-batch")
    add_options(parser, EngineArgs, "EngineConfig", grouped=True)
    add_hidden_options(parser, NOT_BUILT)


def run(values: dict[str, Any]) -> int:
    """Answers the file; gives the exit code: 1 where no request was answered.

    Raises:
        InputError: a mistake of the user's, before the first request.
    """
    given = with_model(values)
    own = {field.name for field in dataclasses.fields(RunBatchArgs)}
    args = RunBatchArgs(**{name: value for name, value in given.items() if name in own})
    engine = engine_args({name: value for name, value in given.items() if name not in own})
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(message)s")
    prepare_environment(os.environ, has_store=engine.executables is not None)
    return asyncio.run(_run(args, engine))


async def _run(args: RunBatchArgs, engine: EngineArgs) -> int:
    import httpx

    from jaxllm.api.async_llm import AsyncLLM
    from jaxllm.server.app import build_app

    llm = AsyncLLM.from_engine_args(engine)
    try:
        app = build_app(llm, engine.model, args.server_args())
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client,
        ):
            under_way = _UNDER_WAY * (engine.max_num_seqs or _USUAL_ROWS) * engine.data_parallel_size
            answered, failed = await run_batch(client, args.source, args.target, under_way)
    finally:
        await asyncio.to_thread(llm.shutdown)
    count = f"{answered + failed:,} requests: {answered:,} answered, {failed:,} failed"
    print(f"{count}; wrote {args.output_file}", file=sys.stderr)
    return 0 if answered else 1


async def run_batch(client: "httpx.AsyncClient", source: Path, target: Path, under_way: int) -> tuple[int, int]:
    """Sends every line of a file, so many at once, and writes what comes in the file's order.

    Gives how many were answered, and how many failed.
    """
    from tqdm import tqdm

    gate, seen = asyncio.Semaphore(under_way), dict[str, int]()
    tasks: asyncio.Queue[asyncio.Task[dict[str, Any]] | None] = asyncio.Queue()

    async def answer(number: int, line: bytes) -> dict[str, Any]:
        try:
            return await _answer(client, number, line, seen)
        finally:
            gate.release()

    async def send() -> None:
        with source.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    await gate.acquire()
                    tasks.put_nowait(asyncio.create_task(answer(number, line)))
        tasks.put_nowait(None)

    counts = {True: 0, False: 0}
    with target.open("w") as file, tqdm(desc="requests", disable=None, mininterval=0.5, leave=False) as bar:
        sending = asyncio.create_task(send())
        while (task := await tasks.get()) is not None:
            entry = await task
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            file.flush()
            counts[entry["error"] is None] += 1
            bar.update()
        await sending
    return counts[True], counts[False]


async def _answer(client: "httpx.AsyncClient", number: int, line: bytes, seen: dict[str, int]) -> dict[str, Any]:
    """Gives the line of the output for a line of the input, whatever that is."""
    request, custom_id = None, None
    try:
        request = _read_object(line)
        given = request.get("custom_id")
        custom_id = given if isinstance(given, str) and given else None
        url, body = _checked(request, custom_id, number, seen)
    except InputError as error:
        return _entry(custom_id, None, {"code": "invalid_request", "message": f"line {number}: {error}"})
    response = await client.post(url, json=body)
    said = response.json()
    told = {"status_code": response.status_code, "request_id": f"req-{uuid.uuid4().hex}", "body": said}
    if response.status_code == 200:
        return _entry(custom_id, told, None)
    cause = said["error"]
    return _entry(custom_id, told, {"code": cause.get("code") or cause["type"], "message": cause["message"]})


def _read_object(line: bytes) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is not valid JSON: {error}") from None
    if not isinstance(request, dict):
        raise InputError(f"it must be a JSON object with custom_id, method, url and body, got {request!r:.60}")
    return request


def _checked(
    request: Mapping[str, Any], custom_id: str | None, number: int, seen: dict[str, int]
) -> tuple[str, Mapping[str, Any]]:
    """Gives where a request goes and what it says.

    Raises:
        InputError: it cannot be one of this file's.
    """
    if custom_id is None:
        raise InputError(f"custom_id must be a text that tells the answers apart, got {request.get('custom_id')!r:.60}")
    if seen.setdefault(custom_id, number) != number:
        raise InputError(f"custom_id {custom_id!r:.60} is that of line {seen[custom_id]} too")
    method, url, body = request.get("method", "POST"), request.get("url"), request.get("body")
    if method != "POST":
        raise InputError(f"method must be 'POST', got {method!r:.60}")
    if url not in URLS:
        raise InputError(f"url must be {' or '.join(URLS)}, got {url!r:.60}")
    if not isinstance(body, dict):
        raise InputError(f"body must be a JSON object, got {body!r:.60}")
    if body.get("stream"):
        raise InputError("stream must be left out: an answer of a file comes whole")
    return url, body


def _entry(
    custom_id: str | None, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
