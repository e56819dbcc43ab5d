"""The engine's sockets to the fronts in other processes, and whose request is whose. Knows bytes; no scheduling.

A front that does not read holds nobody up: what waits for it is bounded, and beyond that its requests are given up.
"""

import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import zmq

from jaxllm.config.sampling_params import RequestOutputKind
from jaxllm.engine.addresses import MOST_WAITING, engine_address, front_address
from jaxllm.engine.loop import EngineLoop
from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineCall,
    EngineOutput,
    EngineReply,
    sample_ids,
)
from jaxllm.engine.wire import News, Overrun, Ready, Status, decode_to_engine, encode, news_of
from jaxllm.scheduler.request import RequestUpdate

logger = logging.getLogger(__name__)

_LAST_WORDS = 2000  # milliseconds


class _FrontLink:
    """The way to one front. Its owner takes turns."""

    def __init__(self, context: zmq.Context, address: str, identity: bytes):
        self.is_overrun = False
        self._context, self._address, self._identity = context, address, identity
        self._socket = self._connect()

    def renew(self) -> None:
        """Begins anew, with a front that has taken the place of another: what that one did not read is dropped."""
        self._socket.close(linger=0)
        self._socket = self._connect()
        self.is_overrun = False

    def send(self, content: bytes) -> bool:
        """Sends without waiting; says whether there was room."""
        try:
            self._socket.send(content, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=_LAST_WORDS)

    def _connect(self) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        socket.connect(self._address)
        return socket


class Fronts:
    """Carries what fronts ask to an engine's loop, and what the loop brings to those who asked."""

    def __init__(self, folder: Path, generation: int, count: int):
        self._context = zmq.Context()
        self._inbound = self._context.socket(zmq.ROUTER)
        self._inbound.setsockopt(zmq.RCVHWM, 0)
        self._inbound.bind(engine_address(folder, generation))
        identity = str(generation).encode()
        self._links = [_FrontLink(self._context, front_address(folder, k), identity) for k in range(count)]
        self._turn = threading.Lock()  # for all below and the links
        self._owners: dict[str, int] = {}  # front by sample
        self._calls: dict[int, tuple[int, int]] = {}  # front and its number of the call
        self._numbers = itertools.count()
        self._ready: bytes | None = None
        self._loop: EngineLoop | None = None
        self._told: Status | None = None
        self._is_closed = threading.Event()
        self._receiving = threading.Thread(target=self._receive, name="jaxllm-fronts", daemon=True)

    def serve(self, loop: EngineLoop, ready: Ready) -> None:
        """Tells all fronts that the engine takes requests, and takes them."""
        self._loop = loop
        with self._turn:
            self._ready = encode(ready)
            for link in self._links:
                link.send(self._ready)
        self._receiving.start()

    def publish(self, outputs: Sequence[EngineOutput]) -> None:
        """Sends each front what concerns it of a step, in one message."""
        assert self._loop is not None
        stats = self._loop.stats
        with self._turn:
            if len(self._links) == 1:
                updates = [output for output in outputs if isinstance(output, RequestUpdate)]
                for update in updates:
                    if update.finish_reason is not None:
                        self._owners.pop(update.request_id, None)
                replies = self._own_replies(outputs).get(0, [])
                self._send(0, news_of(updates, replies, stats))
                return
            replies = self._own_replies(outputs)
            by_front: dict[int, list[RequestUpdate]] = {front: [] for front in replies}
            for output in outputs:
                if isinstance(output, RequestUpdate):
                    drop = self._owners.get if output.finish_reason is None else self._owners.pop
                    front = drop(output.request_id, None)
                    if front is not None:
                        by_front.setdefault(front, []).append(output)
            for front, updates in by_front.items():
                self._send(front, news_of(updates, replies.get(front, []), stats))

    def tell(self, hanging: str | None, is_compiled: bool) -> None:
        """Tells all fronts how the engine stands, unless nothing has changed; to be called now and then."""
        assert self._loop is not None
        status = Status(self._loop.stats, hanging, is_compiled)
        with self._turn:
            for link in self._links:
                if link.is_overrun and link.send(encode(Overrun())):
                    link.is_overrun = False
            if status != self._told:
                self._told = status
                for front in range(len(self._links)):
                    self._send(front, status)

    def replace_front(self, front: int) -> None:
        """Ends the requests of a front that is gone, and greets the one that comes instead."""
        with self._turn:
            self._links[front].renew()
            if self._ready is not None:
                self._links[front].send(self._ready)
            self._give_up(front)

    def close(self) -> None:
        """Ends; what was sent still arrives."""
        self._is_closed.set()
        if self._receiving.is_alive():
            self._receiving.join()
        with self._turn:
            for link in self._links:
                link.close()
        self._inbound.close(linger=0)
        self._context.term()

    def _own_replies(self, outputs: Sequence[EngineOutput]) -> dict[int, list[EngineReply]]:
        replies: dict[int, list[EngineReply]] = {}
        for output in outputs:
            if isinstance(output, EngineReply) and output.call_id in self._calls:
                front, number = self._calls.pop(output.call_id)
                replies.setdefault(front, []).append(EngineReply(number, output.value, output.error, output.is_refusal))
        return replies

    def _send(self, front: int, message: News | Status) -> None:
        link = self._links[front]
        if link.is_overrun or link.send(encode(message)):
            return
        link.is_overrun = True
        logger.error("front %d has left %d messages unread: its requests are given up", front, MOST_WAITING)
        self._give_up(front)

    def _give_up(self, front: int) -> None:
        names = tuple(name for name, owner in self._owners.items() if owner == front)
        for name in names:
            del self._owners[name]
        if names and self._loop is not None:
            self._loop.send(AbortRequests(names))

    def _receive(self) -> None:
        while not self._is_closed.is_set():
            if not self._inbound.poll(100):
                continue
            sender, content = self._inbound.recv_multipart()
            try:
                self._take(int(sender.partition(b"-")[0]), content)
            except ValueError:
                logger.exception("a front said what cannot be read")

    def _take(self, front: int, content: bytes) -> None:
        assert self._loop is not None
        message = decode_to_engine(content)
        with self._turn:
            match message:
                case AddRequest():
                    # A front books the tokens of each step by itself, and goes on from them with another engine.
                    params = message.params.replace(output_kind=RequestOutputKind.DELTA)
                    message = replace(message, params=params)
                    names = message.outputs or sample_ids(message.request_id, message.params.n)
                    self._owners |= dict.fromkeys(names, front)
                case EngineCall(call_id, method, arguments):
                    number = next(self._numbers)
                    self._calls[number] = (front, call_id)
                    message = EngineCall(number, method, arguments)
            self._loop.send(message)
