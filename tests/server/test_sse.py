import asyncio
import json
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from jaxllm.api.errors import EngineDeadError
from jaxllm.server.sse import DONE, EventStream, event, stream_events


def test_an_event_is_one_line_wherever_unicode_ends_lines():
    text = "a\u2028b\u2029c\x85d\ne\r\x0b\x0cf é 😀"
    raw = event({"text": text})
    assert raw.endswith(b"\n\n")
    assert len(raw.decode().splitlines()) == 2
    assert json.loads(raw.removeprefix(b"data: ")) == {"text": text}


async def collect(events: AsyncGenerator[bytes]) -> list[bytes]:
    return [piece async for piece in stream_events(events)]


def test_a_stream_ends_with_done():
    async def events() -> AsyncGenerator[bytes]:
        yield b"one"

    assert asyncio.run(collect(events())) == [b"one", DONE]


def test_an_error_is_an_event_before_done():
    async def events() -> AsyncGenerator[bytes]:
        yield b"one"
        raise EngineDeadError("the engine died:\nof boredom")

    first, error, last = asyncio.run(collect(events()))
    assert (first, last) == (b"one", DONE)
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "the engine died: of boredom"


def test_the_source_is_closed_when_sending_fails():
    closed = []

    async def events() -> AsyncGenerator[bytes]:
        try:
            yield b"one"
            yield b"two"
        finally:
            closed.append(True)

    async def send(message: Message) -> None:
        if message.get("body") == b"two":
            raise OSError("the client is gone")

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def respond() -> None:
        response = EventStream(events())
        with pytest.raises(ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
        assert closed == [True]

    asyncio.run(respond())
