"""Whether a client still waits for its answer. Knows the connection; no request, no engine."""

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from jaxllm.server.answers import Json
from jaxllm.server.state import json_response

_CLIENT_LEFT = 499  # nobody reads it; nginx's name for what happened


async def while_connected(http: Request, answer: Callable[[], Awaitable[Json]]) -> Response:
    """Answers in one piece; a client that leaves cancels the work."""
    work = asyncio.ensure_future(answer())
    left = asyncio.create_task(_client_left(http))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        return json_response(work.result()) if work.done() else Response(status_code=_CLIENT_LEFT)
    finally:
        left.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def _client_left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
