import asyncio
from collections.abc import Sequence

import pytest

from jaxllm.bench.http_stream import HttpError, HttpStreams

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab\r\nc\r\n1a;x=y\r\n"
    + b"d" * 26
    + b"\r\n0\r\nT: 1\r\n\r\n"
)
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nabcd"
REFUSED = b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\nno"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"


def answers(script: Sequence[bytes], size: int = 1 << 20, timeout: float = 5.0) -> tuple[list, int]:
    """Sends a request for each answer of the script, which comes in pieces of `size` bytes.

    Gives for each the status, the body of a refusal and what was handed on, or the error; and how many connections
    there were. An answer of no length ends its connection, as do b"" and what says so.
    """
    connections, left = 0, list(script)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while left:
            try:
                await reader.readuntil(b"\r\n\r\nhello")
            except asyncio.IncompleteReadError:
                break
            answer = left.pop(0)
            for start in range(0, len(answer), size):
                writer.write(answer[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
            if answer in (TO_THE_END, CLOSING, b"") or len(answer) < 20:
                break
        writer.close()

    async def run() -> list:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        streams = HttpStreams(f"http://127.0.0.1:{port}/v1/x?y=z", {"A": "b"}, timeout)
        found = []
        for _ in script:
            taken: list[bytes] = []
            try:
                status, refusal = await streams.post(b"hello", lambda data, came, taken=taken: taken.append(data))
                found.append((status, refusal, b"".join(taken)))
            except HttpError as error:
                found.append(str(error))
        streams.close()
        server.close()
        return found

    return asyncio.run(run()), connections


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_bodies_come_whole_however_they_are_framed_and_cut(size: int):
    found, connections = answers([CHUNKED, LENGTH, REFUSED, CHUNKED, CLOSING, TO_THE_END, LENGTH], size)
    chunked, four = (200, b"", b"ab\r\nc" + b"d" * 26), (200, b"", b"abcd")
    assert found == [chunked, four, (400, b"no", b""), chunked, (200, b"", b"ok"), four, four]
    assert connections == 3  # but for those that the server closes, one serves all


def test_what_goes_wrong_is_told_and_the_next_request_goes_on():
    broken = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"
    found, _ = answers([b"SSH-2.0\r\n\r\n", broken, b"", CHUNKED[:-9], LENGTH], timeout=0.2)
    assert found == [
        "what comes is no HTTP/1.1: invalid literal for int() with base 10: 'SSH-2.0'",
        "what comes is no HTTP/1.1: invalid literal for int() with base 16: b'xyz'",
        "the connection ended before the answer was whole",
        "nothing came for 0.2 s",
        (200, b"", b"abcd"),
    ]


def test_nobody_at_the_port_is_one_line():
    async def run() -> None:
        await HttpStreams("http://127.0.0.1:9/", {}, 1.0).post(b"", lambda data, came: None)

    with pytest.raises(HttpError, match=r"no connection: .*9"):
        asyncio.run(run())
