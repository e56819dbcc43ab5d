"""One of several processes that answer HTTP: `python -m jaxllm.server.front_process`. Starts no engine.

It is started by front_supervisor.py and ends with the process that started it.
"""

import socket
import sys
from pathlib import Path

from jaxllm.api.errors import EngineDeadError
from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.child_process import Parent, as_fields
from jaxllm.server.front import run_front
from jaxllm.server.logs import set_up_logging


def main() -> int:
    """Waits for the engine and answers HTTP until told to stop; gives the exit code."""
    parent = Parent()
    order = parent.order
    engine_args, args = EngineArgs(**as_fields(order["engine"])), ServerArgs(**as_fields(order["server"]))
    set_up_logging(args)
    parent.listen(lambda order: None)
    with socket.socket(fileno=order["socket"]) as bound:
        try:
            return run_front(bound, Path(order["folder"]), order["index"], engine_args, args, greets=order["greets"])
        except EngineDeadError:  # the parent knows, and says why
            return 0


if __name__ == "__main__":
    sys.exit(main())
