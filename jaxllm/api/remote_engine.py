"""The link to an engine in another process, which may die and come again. Knows sockets and requests; starts nothing.

Whoever starts the engine says so when it has died, or is not coming again, over the same socket as the engine.
"""

import logging
import os
import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import tokenizers
import zmq

from jaxllm.api.accepted import AcceptedRequests
from jaxllm.api.errors import EngineDeadError
from jaxllm.api.listeners import Listeners
from jaxllm.engine.addresses import MOST_WAITING, engine_address, front_address
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineCall,
    EngineOutput,
    EngineReply,
    EngineStats,
    Message,
)
from jaxllm.engine.wire import (
    Died,
    Ended,
    News,
    Overrun,
    Ready,
    Status,
    ToFront,
    TokenizerParts,
    as_wire,
    decode_to_front,
    encode,
    read_limits,
    read_updates,
)
from jaxllm.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_AT_ONCE = 256  # messages that are read before they are handed on


class RemoteEngine:
    """Sends requests to whichever engine runs at present, and to the next one again what is unfinished when one dies.

    `index` is this front's among `count` that the engine has.
    """

    def __init__(self, folder: Path, index: int, count: int, seed: int, listeners: Listeners):
        self._folder, self._index = folder, index
        self._listeners = listeners
        self._context = zmq.Context()
        self._inbound = self._context.socket(zmq.ROUTER)
        self._inbound.setsockopt(zmq.RCVHWM, MOST_WAITING)
        self._inbound.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an engine that connects anew has the name that it had
        self._inbound.bind(front_address(folder, index))
        self._turn = threading.Lock()  # for what has been accepted, and the way to the engine
        seeds = Random(seed if count == 1 else f"{seed} of front {index}")
        self._accepted = AcceptedRequests("" if count == 1 else f"{index}/", seeds)
        self._outbound: zmq.Socket | None = None
        self._generation = b""
        self._calls: set[int] = set()
        self._is_paused = False
        self._limits: EngineLimits | None = None
        self._sampling_defaults: Mapping[str, Any] = {}
        self._status = Status(EngineStats(), None, False)
        self._down: str | None = "the engine starts"
        self._lost: str | None = None
        self._first: queue.SimpleQueue[Ready | Ended] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._receiving = threading.Thread(target=self._receive, name="jaxllm-engine-link", daemon=True)
        self._receiving.start()

    def wait_until_ready(self) -> Ready:
        """Waits for the first engine.

        Raises:
            EngineDeadError: it could not start.
        """
        first = self._first.get()
        if isinstance(first, Ended):
            raise EngineDeadError(first.line)
        return first

    @property
    def limits(self) -> EngineLimits:
        assert self._limits is not None, "the engine has never been ready"
        return self._limits

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self._sampling_defaults

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters, as it told them last."""
        return self._status.stats

    @property
    def lost(self) -> str | None:
        """Says why nothing will be answered any more."""
        return self._lost

    @property
    def trouble(self) -> str | None:
        """Says why nothing is answered at present."""
        if self._down is not None:
            return self._down
        return None if self._status.hanging is None else f"the engine hangs: {self._status.hanging}"

    @property
    def is_compiled(self) -> bool:
        """Says whether no step shape is left to be compiled in the background."""
        return self._status.is_compiled

    def send(self, message: Message) -> None:
        """Sends to the engine; while there is none, requests wait for the next and calls fail."""
        refused: EngineReply | None = None
        with self._turn:
            match message:
                case AddRequest():
                    message = self._accepted.add(message)
                case AbortRequests(request_ids):
                    message = AbortRequests(self._accepted.abort(request_ids))
                case EngineCall(call_id, method, _):
                    if self._outbound is None:
                        refused = EngineReply(call_id, error=f"{method} cannot be called: {self._down}")
                    else:
                        self._calls.add(call_id)
                        self._is_paused = method == "pause" or (self._is_paused and method != "resume")
            if self._outbound is not None:
                self._outbound.send(encode(as_wire(message)))
        if refused is not None:
            self._listeners.publish([refused])

    def stop(self) -> None:
        """Takes nothing up any more."""
        self._is_closed.set()
        if threading.current_thread() is not self._receiving:
            self._receiving.join()

    def close(self) -> None:
        """Ends the sockets."""
        with self._turn:
            if self._outbound is not None:
                self._outbound.close(linger=0)
                self._outbound = None
        self._inbound.close(linger=0)
        self._context.term()

    def _receive(self) -> None:
        try:
            while not self._is_closed.is_set():
                if self._inbound.poll(100):
                    self._take_all()
        except Exception as error:
            logger.exception("the link to the engine broke")
            self._lost = f"the link to the engine broke: {type(error).__name__}: {error}"
            self._listeners.fail_all(EngineDeadError(self._lost))

    def _take_all(self) -> None:
        """Takes what has come, and hands the updates of several steps on at once where there are several."""
        outputs: list[EngineOutput] = []
        for _ in range(_AT_ONCE):
            try:
                sender, content = self._inbound.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(sender, decode_to_front(content), outputs)
        if outputs:
            self._listeners.publish(outputs)

    def _take(self, sender: bytes, message: ToFront, outputs: list[EngineOutput]) -> None:
        if isinstance(message, Ready):
            self._take_up(sender, message, outputs)
        elif isinstance(message, Died | Ended):
            self._let_go(message, outputs)
        elif sender != self._generation:
            return  # of an engine that is gone, whose requests the next one has
        elif isinstance(message, News):
            with self._turn:
                outputs += self._accepted.take(read_updates(message))
                self._calls.difference_update([reply.call_id for reply in message.replies])
            outputs += message.replies
            self._status.stats = message.stats
        elif isinstance(message, Status):
            self._status = message
        elif isinstance(message, Overrun):
            self._give_up()

    def _take_up(self, sender: bytes, ready: Ready, outputs: list[EngineOutput]) -> None:
        """Goes over to an engine that has started, and gives it what is unfinished."""
        with self._turn:
            if self._outbound is not None:
                self._outbound.close(linger=0)
            self._generation = sender
            self._outbound = self._context.socket(zmq.DEALER)
            self._outbound.setsockopt(zmq.IDENTITY, f"{self._index}-{os.getpid()}".encode())
            self._outbound.setsockopt(zmq.SNDHWM, 0)
            self._outbound.connect(engine_address(self._folder, ready.generation))
            outputs += self._accepted.end_aborted()
            if self._is_paused:
                self._outbound.send(encode(as_wire(EngineCall(-1, "pause", ("keep",)))))
            unfinished = self._accepted.unfinished()
            for request in unfinished:
                self._outbound.send(encode(as_wire(request)))
            self._down = None
        if unfinished:
            logger.info("%d accepted request(s) go on where they were", len(unfinished))
        if self._limits is None:
            self._limits, self._sampling_defaults = read_limits(ready), ready.sampling_defaults
            self._first.put(ready)

    def _let_go(self, message: Died | Ended, outputs: list[EngineOutput]) -> None:
        """Holds all requests until the next engine comes, if one comes."""
        with self._turn:
            if self._outbound is not None:
                self._outbound.close(linger=0)
                self._outbound = None
            self._generation = b""
            self._down = message.line
            calls, self._calls = self._calls, set()
        outputs += [EngineReply(call_id, error=message.line) for call_id in calls]
        self._status = Status(EngineStats(), None, False)
        if isinstance(message, Ended):
            self._lost = message.line
            self._first.put(message)
            self._listeners.fail_all(EngineDeadError(message.line))

    def _give_up(self) -> None:
        """Ends all requests: the engine has dropped tokens of theirs."""
        line = f"this front read nothing for more than {MOST_WAITING} steps, so the engine gave its requests up"
        with self._turn:
            names = self._accepted.abort_all()
            if self._outbound is not None:
                self._outbound.send(encode(as_wire(AbortRequests(names))))
        self._listeners.fail_all(EngineDeadError(line))


def tokenizer_parts(tokenizer: Tokenizer | None) -> TokenizerParts | None:
    """Gives a tokenizer as plain data."""
    if tokenizer is None:
        return None
    return TokenizerParts(
        tokenizer.backend.to_str(),
        tokenizer.special_tokens,
        tokenizer.eos_token_ids,
        tokenizer.chat_template,
        tokenizer.tool_chat_template,
        tokenizer.named_chat_templates,
    )


def make_tokenizer(parts: TokenizerParts | None) -> Tokenizer | None:
    """Makes the tokenizer that was told."""
    if parts is None:
        return None
    return Tokenizer(
        tokenizers.Tokenizer.from_str(parts.backend),
        special_tokens=parts.special_tokens,
        eos_token_ids=parts.eos_token_ids,
        chat_template=parts.chat_template,
        tool_chat_template=parts.tool_chat_template,
        named_chat_templates=parts.named_chat_templates,
    )
