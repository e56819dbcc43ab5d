"""The header X-Request-Id, in and out. An ASGI layer before everything else; knows headers only."""

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.server.errors import ApiError, error_response

HEADER = "X-Request-Id"
_LONGEST = 256


class RequestIds:
    """Gives each request the id of its header, and where `answers` is set each answer the same header.

    A request without one gets a new id then.
    """

    def __init__(self, app: ASGIApp, answers: bool):
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(HEADER) or None
        if request_id is not None and not is_request_id(request_id):
            wanted = f"{HEADER} must have at most {_LONGEST} printable ASCII characters"
            await error_response(ApiError(wanted))(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        if request_id is None and self._answers:
            state["new_request_id"] = request_id = uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = str(request_id)
            await send(message)

        await self._app(scope, receive, send_with_id if self._answers else send)


def is_request_id(text: str) -> bool:
    """Says whether a client's id can stand in headers and log lines."""
    return 0 < len(text) <= _LONGEST and text.isascii() and text.isprintable()
