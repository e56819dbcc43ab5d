"""The engine's process, from its start to its end: `python -m jaxllm.server.engine_process`. Knows no HTTP, no text.

It is started by engine_supervisor.py, takes requests from fronts over sockets, and ends with the process that started
it.
"""

import gc
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from jaxllm.api.remote_engine import tokenizer_parts
from jaxllm.api.start import Started, start_engine
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.config.server_args import ServerArgs
from jaxllm.engine.fronts import Fronts
from jaxllm.engine.loop import EngineLoop
from jaxllm.engine.wire import Ready, plain_limits
from jaxllm.server.child_process import Parent, as_fields
from jaxllm.server.logs import set_up_logging

logger = logging.getLogger(__name__)

_TELL_EVERY = 0.25  # seconds
_FAILED, _MISUSED = 1, 2  # exit codes


def main() -> int:
    """Starts the engine that the parent orders, and runs it until told to stop; gives the exit code."""
    parent = Parent()
    set_up_logging(ServerArgs(**as_fields(parent.order["server"])))
    try:
        started = start_engine(EngineArgs(**as_fields(parent.order["engine"])))
    except InputError as error:
        parent.report(refused=str(error))
        return _MISUSED
    gc.collect()
    gc.freeze()  # what a start leaves lives on: collecting through it would hold up a step for milliseconds
    return run(started, parent)


def run(started: Started, parent: Parent) -> int:
    """Runs an engine until the parent says stop; gives the exit code."""
    built, order = started.built, parent.order
    is_told, is_dead = threading.Event(), threading.Event()
    _leave_on_sigterm(parent)
    if built.processes is not None:
        built.processes.on_loss(lambda line: parent.report(lost=line))
    fronts = Fronts(Path(order["folder"]), order["generation"], order["server"]["api_server_count"])

    def on_death(error: BaseException) -> None:
        parent.report(died=f"{type(error).__name__}: {error}")
        is_dead.set()
        is_told.set()

    loop = EngineLoop(built.engine, fronts.publish, on_death)

    def take(order: dict[str, Any]) -> None:
        if "replace_front" in order:
            fronts.replace_front(order["replace_front"])
        if "stop" in order:
            is_told.set()

    limits, processors = plain_limits(built.engine.limits)
    tokenizer = tokenizer_parts(started.tokenizer)
    fronts.serve(loop, Ready(order["generation"], limits, processors, built.sampling_defaults, tokenizer))
    parent.listen(take)
    parent.report(ready=True)
    while not is_told.wait(_TELL_EVERY):
        fronts.tell(loop.hanging, built.wait_until_compiled(0))
    if is_dead.is_set():
        os._exit(_FAILED)  # nothing is waited for: the device may hang
    loop.stop()
    fronts.close()
    built.close()
    return 0


def _leave_on_sigterm(parent: Parent) -> None:
    """Has the signal, also one that another process of the engine sends on, stop the server in order."""

    def ask(number: int, frame: FrameType | None) -> None:
        parent.report(leave=True)

    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
