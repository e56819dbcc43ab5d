"""A start, from flags to a server that answers, and its end. Knows the order; each part stands elsewhere."""

import errno
import gc
import json
import logging
import socket
import sys
from typing import TYPE_CHECKING

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.listen import address_error, bind_socket

if TYPE_CHECKING:
    from jaxllm.api.engine_client import EngineClient
    from jaxllm.server.peer_books import PeerBooks

logger = logging.getLogger(__name__)

STATS_EVERY = 10.0  # seconds
_EVERY_INTERFACE = ("0.0.0.0", "::", "")


def serve(engine_args: EngineArgs, args: ServerArgs) -> int:
    """Serves until told to stop; gives the exit code.

    Raises:
        InputError: a mistake of the user's, before anything is served.
    """
    set_up_logging(args)
    if engine_args.node_rank > 0:
        from jaxllm.api.follower import follow

        follow(engine_args)
        return 0
    from jaxllm.server.processes import serve_here, serve_in_processes

    with bind_socket(args.host, args.port) as bound:
        apart = args.api_server_count > 1
        return (serve_in_processes if apart else serve_here)(bound, engine_args, args)


def run_app(
    llm: "EngineClient",
    bound: socket.socket,
    engine_args: EngineArgs,
    args: ServerArgs,
    *,
    greets: bool,
    peers: "PeerBooks | None" = None,
) -> int:
    """Answers HTTP until told to stop; gives the exit code. `peers` has the books of other processes that do the same.

    Raises:
        InputError: another process listens at the address.
    """
    import uvicorn

    from jaxllm.server.app import build_app
    from jaxllm.server.draining import DrainingServer

    app = build_app(
        llm,
        engine_args.model,
        args,
        log_stats_every=None if engine_args.disable_log_stats else STATS_EVERY,
        peers=peers,
    )
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        root_path=args.root_path,
    )
    if args.uvicorn_log_level == "info":  # its lines about start and stop repeat ours
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    host, port = bound.getsockname()[:2]

    def greet() -> None:
        print(greeting(llm, args.model_names(engine_args.model)[0], host, port), flush=True)

    server = DrainingServer(
        config,
        drain_seconds=args.shutdown_timeout,
        on_ready=greet if greets else lambda: None,
        abort_all=llm.abort_all,
    )
    gc.collect()
    gc.freeze()  # what a start leaves lives on: collecting through it would hold up streams for milliseconds
    try:
        server.run([bound])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise address_error(host, port, error) from None  # another process bound it too, and listened first
    return 0


def greeting(llm: "EngineClient", model_name: str, host: str, port: int) -> str:
    """Tells where the server is, how to ask it something, and how to stop it."""
    everywhere = host in _EVERY_INTERFACE
    reachable = "127.0.0.1" if everywhere else f"[{host}]" if ":" in host else host
    address = f"http://{reachable}:{port}"
    tokenizer = llm.get_tokenizer()
    if tokenizer is not None and tokenizer.chat_template is not None:
        question = {"role": "user", "content": "What is the capital of France?"}
        route, body = "chat/completions", {"model": model_name, "messages": [question], "temperature": 0}
    else:
        prompt = "The capital of France is" if tokenizer is not None else [1, 2, 3]
        route, body = "completions", {"model": model_name, "prompt": prompt, "max_tokens": 16}
    quoted = json.dumps(body).replace("'", "'\\''")
    return (
        f"\njaxllm serves {model_name} at {address}{' and on every other interface' if everywhere else ''}\n\n"
        f"  curl {address}/v1/{route} -H 'Content-Type: application/json' -d '{quoted}'\n\n"
        "Ctrl-C stops it: running requests may end first, a second Ctrl-C does not wait for them.\n"
    )


def set_up_logging(args: ServerArgs) -> None:
    """Sends log lines to stderr, so that stdout has only what is meant for the terminal."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"
    )
    for name in ("httpx", "jax"):
        logging.getLogger(name).setLevel(logging.WARNING)
