"""One of several processes that answer HTTP: `python -m jaxllm.server.front_process`. Starts no engine.

It is started by front_supervisor.py and ends with the process that started it.
"""

import socket
import sys
from pathlib import Path

from jaxllm.api.engine_client import EngineClient
from jaxllm.api.errors import EngineDeadError
from jaxllm.api.listeners import Listeners
from jaxllm.api.remote_engine import RemoteEngine, make_tokenizer
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.child_process import Parent, as_fields
from jaxllm.server.peer_books import PeerBooks
from jaxllm.server.serve import run_app, set_up_logging


def main() -> int:
    """Waits for the engine and answers HTTP until told to stop; gives the exit code."""
    parent = Parent()
    order = parent.order
    engine_args, args = EngineArgs(**as_fields(order["engine"])), ServerArgs(**as_fields(order["server"]))
    set_up_logging(args)
    parent.listen(lambda order: None)
    listeners, folder = Listeners(), Path(order["folder"])
    link = RemoteEngine(folder, order["index"], args.api_server_count, engine_args.seed, listeners)
    import jaxllm.server.app  # noqa: F401  (a second's work, while the engine starts)

    try:
        ready = link.wait_until_ready()
    except EngineDeadError:  # the parent knows, and says why
        return 0
    client = EngineClient(link, listeners, make_tokenizer(ready.tokenizer), engine_args.model)
    peers = PeerBooks(folder, order["index"], args.api_server_count)
    peers.keep(client.books, args.model_names(engine_args.model)[0])
    with socket.socket(fileno=order["socket"]) as bound:
        try:
            return run_app(client, bound, engine_args, args, greets=order["greets"], peers=peers)
        finally:
            client.shutdown()


if __name__ == "__main__":
    sys.exit(main())
