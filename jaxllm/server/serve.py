"""A start, from flags to a server that answers, and its end. Knows the order; each part stands elsewhere."""

import errno
import gc
import json
import logging
import shlex
import socket
from typing import TYPE_CHECKING

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.listen import address_error, bind_socket, bind_unix_socket
from jaxllm.server.logs import set_up_logging
from jaxllm.server.tls import tls_settings

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
    tls_settings(args)  # a certificate that is no good is told at once
    from jaxllm.server.processes import serve_here, serve_in_processes

    with bind_socket(args.host, args.port) if args.uds is None else bind_unix_socket(args.uds) as bound:
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
        h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
        **tls_settings(args),
    )
    if args.uvicorn_log_level == "info":  # its lines about start and stop repeat ours
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    host, port = bound.getsockname()[:2] if args.uds is None else (args.host, args.port)

    def greet() -> None:
        print(greeting(llm, args, args.model_names(engine_args.model)[0], host, port), flush=True)

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


def greeting(llm: "EngineClient", args: ServerArgs, model_name: str, host: str, port: int) -> str:
    """Tells where the server is, how to ask it something, and how to stop it."""
    everywhere = args.uds is None and host in _EVERY_INTERFACE
    reachable = "127.0.0.1" if everywhere else f"[{host}]" if ":" in host else host
    scheme = "http" if args.ssl_certfile is None else "https"
    address = f"{scheme}://{reachable}:{port}" if args.uds is None else f"{scheme}://localhost"
    options = [] if args.uds is None else [f"--unix-socket {shlex.quote(args.uds)}"]
    options += ["-H 'Authorization: Bearer KEY'"] if args.api_key else []
    place = address if args.uds is None else args.uds
    tokenizer = llm.get_tokenizer()
    if tokenizer is not None and tokenizer.chat_template is not None:
        question = {"role": "user", "content": "What is the capital of France?"}
        route, body = "chat/completions", {"model": model_name, "messages": [question], "temperature": 0}
    else:
        prompt = "The capital of France is" if tokenizer is not None else [1, 2, 3]
        route, body = "completions", {"model": model_name, "prompt": prompt, "max_tokens": 16}
    quoted = json.dumps(body).replace("'", "'\\''")
    return (
        f"\njaxllm serves {model_name} at {place}{' and on every other interface' if everywhere else ''}\n\n"
        f"  {' '.join(['curl', *options, address])}/v1/{route} -H 'Content-Type: application/json' -d '{quoted}'\n\n"
        "Ctrl-C stops it: running requests may end first, a second Ctrl-C does not wait for them.\n"
    )
