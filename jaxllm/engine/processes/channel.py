"""Sockets between process 0 and the others: messages in order, and the end of all when one is gone.

Process 0 has a link to each other process, those to process 0 only. Knows messages as wholes; no steps, no devices.
A process is gone when its connection closes, or when nothing was heard of it for `SILENCE` seconds, in which it sends
at least a heartbeat. Then the others end too: none can run a step without it, and a thread that waits for it in a
collective cannot be woken.
"""

import contextlib
import logging
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from jaxllm.engine.processes.messages import Gone, Heartbeat, Message, Refused, Stop, decode, encode

logger = logging.getLogger(__name__)

SILENCE = 20  # seconds
_HEARTBEAT = 2.0  # seconds
_LAST_WORDS = 1.0  # seconds in which requests may be told why they end
_LENGTH = struct.Struct("!Q")
_LARGEST = 1 << 32  # bytes of a message
_LARGEST_AT_FIRST = 1 << 20  # of one by a stranger


class Link:
    """Whole messages over one socket. Any thread may send, one receives."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self._turn = threading.Lock()
        self.limit = _LARGEST_AT_FIRST
        self.has_spoken = True  # since somebody looked last

    def send(self, message: Message) -> None:
        """Sends a message; returns when the system has taken it."""
        content = encode(message)
        with self._turn:
            self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def try_send(self, message: Message) -> None:
        """Sends a short message, unless it would have to wait for another, or for the other side to read."""
        content = encode(message)
        if not self._turn.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(OSError, ValueError):  # whoever receives finds out why
                poll = select.poll()
                poll.register(self._socket, select.POLLOUT)
                if poll.poll(0):
                    self._socket.sendall(_LENGTH.pack(len(content)) + content)
        finally:
            self._turn.release()

    def receive(self) -> Message:
        """Waits for a message.

        Raises:
            OSError: the connection is closed, or its timeout is over.
            ValueError: these are no messages.
        """
        size = _LENGTH.unpack(self._read(_LENGTH.size))[0]
        if size > self.limit:
            raise ValueError(f"a message of {size:,} bytes")
        return decode(self._read(size))

    def set_timeout(self, seconds: float | None) -> None:
        """Limits how long a send or receive waits."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Ends the connection; what was sent still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view, done = memoryview(content), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise ConnectionError("its connection closed")
            self.has_spoken = True
            done += count
        return content


class Channel:
    """All links of one process. `count` processes take part, of which this one is `rank`."""

    def __init__(self, rank: int, count: int):
        self.rank = rank
        self.count = count
        self.hosts = ["?"] * count
        self.is_leaving = False  # this process was told to stop
        self._links: dict[int, Link] = {}
        self._inboxes: dict[int, queue.SimpleQueue[Message]] = {}
        self._takers: dict[type, Callable[[int, Message], None]] = {}
        self._mourners: list[Callable[[str], None]] = []
        self._is_closed = threading.Event()
        self._end = threading.Lock()  # taken by whoever ends the process, and never given back
        threading.Thread(target=self._watch, name="jaxllm-watch-processes", daemon=True).start()

    @property
    def peers(self) -> list[int]:
        """Lists the ranks that this process has a link to."""
        return sorted(self._links)

    def name(self, rank: int) -> str:
        """Names a process for people."""
        return f"process {rank} of {self.count} (host {self.hosts[rank]})"

    def add(self, rank: int, link: Link, host: str) -> None:
        """Takes a link in; from now on the process of that rank is watched."""
        link.set_timeout(None)
        link.limit = _LARGEST
        self.hosts[rank] = host
        self._inboxes[rank] = queue.SimpleQueue()
        self._links = {**self._links, rank: link}
        threading.Thread(target=self._receive, args=(rank, link), name="jaxllm-receive", daemon=True).start()

    def on(self, kind: type, take: Callable[[int, Message], None]) -> None:
        """Has messages of one kind given to a function, with their sender's rank, on the thread that receives."""
        self._takers[kind] = take

    def on_loss(self, tell: Callable[[str], None]) -> None:
        """Has a function called with the one line that says why, shortly before the process ends."""
        self._mourners.append(tell)

    def receive(self, rank: int, timeout: float | None = None) -> Message:
        """Waits for the next message of a process that no function takes.

        Raises:
            TimeoutError: none came within so many seconds.
        """
        try:
            return self._inboxes[rank].get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"{self.name(rank)} did not answer within {timeout:g} s") from None

    def send(self, message: Message, rank: int | None = None) -> None:
        """Sends a message to one process, or to all; a loss shows elsewhere, so nothing is raised."""
        for peer, link in self._links.items():
            if rank is None or peer == rank:
                try:
                    link.send(message)
                except OSError as error:
                    self._lose(peer, error)

    def send_soon(self, message: Message) -> None:
        """Sends a message to all from another thread: a signal's handler may have interrupted one that sends."""
        threading.Thread(target=self.send, args=(message,), daemon=True).start()

    def tell_end(self, line: str) -> None:
        """Ends the other processes for a reason; this one goes on to its own end, unless it is ending already."""
        self._end.acquire()
        self._is_closed.set()
        for link in self._links.values():
            link.try_send(Gone(line))

    def end(self, line: str) -> None:
        """Ends all processes for a reason; does not return, unless they are ending in order already."""
        if self._is_closed.is_set():
            return
        self._end.acquire()
        for link in self._links.values():
            link.try_send(Gone(line))
        if self.is_leaving:
            os._exit(0)
        sys.stderr.write(f"jaxllm: {line}\n")
        sys.stderr.flush()
        for tell in self._mourners:
            tell(line)
        if self._mourners:
            time.sleep(_LAST_WORDS)
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(_LAST_WORDS)
        os._exit(1)

    def end_unless_lost(self, line: str) -> None:
        """Ends all processes for a reason that the loss of one may have caused, which then is told instead."""
        time.sleep(_LAST_WORDS)
        self.end(line)

    def close(self) -> None:
        """Ends all links in order: nobody is missed from now on."""
        self._is_closed.set()
        for link in self._links.values():
            link.close()

    def expect_end(self) -> None:
        """Lets the other side end first without being missed."""
        self._is_closed.set()

    def _receive(self, rank: int, link: Link) -> None:
        while True:
            try:
                message = link.receive()
            except (OSError, ValueError) as error:
                self._lose(rank, error)
                return
            take = self._takers.get(type(message))
            if isinstance(message, Heartbeat):
                continue
            if isinstance(message, Refused | Stop):
                self._is_closed.set()  # its sender ends, which is no loss
            if isinstance(message, Gone):
                self.end(message.line)
            elif take is not None:
                take(rank, message)
            else:
                self._inboxes[rank].put(message)

    def _lose(self, rank: int, error: Exception) -> None:
        closed = isinstance(error, OSError) and not isinstance(error, TimeoutError)
        why = "its connection closed" if closed else str(error)
        self.end(f"{self.name(rank)} is gone: {why}; the other processes end too")

    def _watch(self) -> None:
        """Counts turns, not time: one's own sleep is nobody's silence."""
        silent: dict[int, int] = {}
        while not self._is_closed.wait(_HEARTBEAT):
            for rank, link in self._links.items():
                link.try_send(Heartbeat())
                silent[rank] = 0 if link.has_spoken else silent.get(rank, 0) + 1
                link.has_spoken = False
                if silent[rank] * _HEARTBEAT >= SILENCE:
                    self._lose(rank, TimeoutError(f"nothing was heard of it for {SILENCE} s"))
