"""POST over HTTP/1.1, the answer handed on as it comes. Knows sockets and bytes: what they say is the caller's.

In the place of a full client, which takes 80 µs for each piece of an answer: at some 10,000 a second one would measure
the client. Connections are kept for the next request.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

type Take = Callable[[bytes, float], None]  # bytes of a body, and when they came

_CONNECT = 60.0  # seconds to wait for a connection


class HttpError(Exception):
    """An answer that did not come, or not whole; the message says why."""


class HttpStreams:
    """Sends requests to one address, each on a connection that no other uses meanwhile."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float):
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"POST {target} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        self._head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())])
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def post(self, content: bytes, take: Take) -> tuple[int, bytes]:
        """Gives the status, and the body where that is not 200; that of a 200 goes to `take`, piece for piece.

        Raises:
            HttpError: there is no connection, it ends before the answer is whole, or nothing comes for too long.
        """
        message = f"{self._head}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
        while True:
            connection, is_new = await self._connection()
            try:
                status, body = await connection.send(message, take, self._timeout)
            except HttpError:
                connection.close()
                if is_new or connection.has_answered:
                    raise
                continue  # the server had closed it, being idle
            except BaseException:
                connection.close()
                raise
            if connection.is_open:
                self._idle.append(connection)
            return status, body

    def close(self) -> None:
        """Ends all connections that are not in use."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> "tuple[_Connection, bool]":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except (OSError, TimeoutError) as error:
            raise HttpError(f"no connection: {error or type(error).__name__}") from None
        return connection, True


class _Connection(asyncio.Protocol):
    """One request after the other; reads heads, and bodies in chunks, of a length, or up to the end."""

    def __init__(self) -> None:
        self.is_open = True
        self.has_answered = False  # something came for the request under way
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._read: Callable[[], bool] = self._read_head  # a step of the parser; False when it needs more bytes
        self._done: asyncio.Future[tuple[int, bytes]] | None = None
        self._take: Take = _drop
        self._came = 0.0
        self._status = 0
        self._left = 0  # bytes of the chunk or body that are still to come
        self._refusal: list[bytes] = []
        self._is_kept = True

    async def send(self, message: bytes, take: Take, timeout: float) -> tuple[int, bytes]:
        assert self._transport is not None
        self._take, self._refusal, self.has_answered = take, [], False
        self._read = self._read_head
        self._came = time.perf_counter()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        while not self._done.done():
            await asyncio.wait([self._done], timeout=timeout)
            if not self._done.done() and time.perf_counter() - self._came >= timeout:
                raise HttpError(f"nothing came for {timeout:g} s")
        return self._done.result()

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._done is None or self._done.done():
            return
        if self._read == self._read_to_the_end:
            self._finish()
        else:
            self._done.set_exception(HttpError("the connection ended before the answer was whole"))

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():  # nobody asked
            self.close()
            return
        self._came, self.has_answered = time.perf_counter(), True
        self._rest = self._rest + data if self._rest else data
        try:
            while self._rest and not self._done.done() and self._read():
                pass
        except ValueError as error:
            self._done.set_exception(HttpError(f"what comes is no HTTP/1.1: {error}"))

    def _read_head(self) -> bool:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        self._rest, self._status = rest, int(first.split()[1] if first.startswith("HTTP/1.") else f"{first:.40}")
        headers = {name.lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
        self._is_kept = headers.get("connection") != "close" and not first.startswith("HTTP/1.0")
        if "chunked" in headers.get("transfer-encoding", ""):
            self._read = self._read_chunk_size
        elif "content-length" in headers:
            self._left, self._read = int(headers["content-length"]), self._read_length
            if not self._left:
                self._finish()
        else:
            self._is_kept, self._read = False, self._read_to_the_end
        return True

    def _read_chunk_size(self) -> bool:
        line, found, rest = self._rest.partition(b"\r\n")
        if not found:
            return False
        self._left = int(line.split(b";")[0], 16)
        self._rest, self._read = rest, self._read_chunk if self._left else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        """Hands on what is there of a chunk; two bytes of line end are behind it."""
        if self._left > 0:
            self._hand_on(self._rest[: self._left])
            count = min(self._left, len(self._rest))
            self._left, self._rest = self._left - count, self._rest[count:]
        if self._left or len(self._rest) < 2:
            return False
        self._rest, self._read = self._rest[2:], self._read_chunk_size
        return True

    def _read_trailer(self) -> bool:
        line, found, rest = self._rest.partition(b"\r\n")
        if not found:
            return False
        self._rest = rest
        if not line:
            self._finish()
        return True

    def _read_length(self) -> bool:
        self._left -= len(self._rest)
        self._read_to_the_end()
        if self._left <= 0:
            self._finish()
        return False

    def _read_to_the_end(self) -> bool:
        self._hand_on(self._rest)
        self._rest = b""
        return False

    def _hand_on(self, data: bytes) -> None:
        if self._status == 200:
            self._take(data, self._came)
        else:
            self._refusal.append(data)

    def _finish(self) -> None:
        assert self._done is not None
        self._done.set_result((self._status, b"".join(self._refusal)))
        if not self._is_kept:
            self.close()


def _drop(data: bytes, came: float) -> None:
    pass
