"""Server-sent events: JSON -> bytes on the wire, and a response that closes its source when the client leaves."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Send

from jaxllm.server.errors import error_body

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # a proxy that collects output is no use here
# JSON escapes the other line ends itself.
_UNICODE_LINE_ENDS = [(char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029"]


def event(data: Any) -> bytes:
    """Writes one event as one line, also for clients that end lines where Unicode does."""
    encoded = msgspec.json.encode(data)
    if not encoded.isascii():
        for raw, escaped in _UNICODE_LINE_ENDS:
            encoded = encoded.replace(raw, escaped)
    return b"data: " + encoded + b"\n\n"


async def stream_events(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Ends a stream of events as OpenAI does: with [DONE], and before it the error if there was one."""
    async with aclosing(events):
        try:
            async for piece in events:
                yield piece
        except Exception as error:
            yield event(error_body(error))
        yield DONE


class EventStream(StreamingResponse):
    """Sends events as they come. When the client has left, the source is closed at once."""

    def __init__(self, events: AsyncGenerator[bytes]):
        self._events = stream_events(events)
        super().__init__(self._events, media_type="text/event-stream", headers=_HEADERS)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)
