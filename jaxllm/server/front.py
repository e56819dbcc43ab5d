"""One front: HTTP over an engine that runs in another process. Knows how the two come together; starts no process."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import jaxllm.server.app  # noqa: F401  (a second's work, which is done while the engine starts)
from jaxllm.api.engine_client import EngineClient
from jaxllm.api.listeners import Listeners
from jaxllm.api.remote_engine import RemoteEngine, make_tokenizer
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.peer_books import PeerBooks
from jaxllm.server.serve import run_app

_PRIORITY = 5  # below the engine's: on two busy cores its steps came up to 4 ms late (p99) without


def run_front(
    bound: socket.socket,
    folder: Path,
    index: int,
    engine_args: EngineArgs,
    args: ServerArgs,
    *,
    greets: bool,
    on_start: Callable[[], None] = lambda: None,
) -> int:
    """Waits for the engine that meets fronts in a folder, and answers HTTP until told to stop; gives the exit code.

    Raises:
        EngineDeadError: the engine cannot start.
        InputError: see run_app.
    """
    _give_way()
    listeners = Listeners()
    link = RemoteEngine(folder, index, args.api_server_count, engine_args.seed, listeners)
    ready = link.wait_until_ready()
    client = EngineClient(link, listeners, make_tokenizer(ready.tokenizer), engine_args.model)
    on_start()
    peers = None
    if args.api_server_count > 1:
        peers = PeerBooks(folder, index, args.api_server_count)
        peers.keep(client.books, args.model_names(engine_args.model)[0])
    try:
        return run_app(client, bound, engine_args, args, greets=greets, peers=peers)
    finally:
        client.shutdown()


def _give_way() -> None:
    """Lets the engine go first where cores are short: this thread and those that it starts."""
    if sys.platform == "linux":  # elsewhere it would concern the whole process, and an engine that is started again
        os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + _PRIORITY, 19))
