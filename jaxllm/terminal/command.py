"""What `chat` and `complete` share: a model from start to end around a session. Knows the order only."""

import logging
import os
import sys
from collections.abc import Callable

from jaxllm.config.engine_args import EngineArgs
from jaxllm.environment import prepare_environment
from jaxllm.terminal.answers import Answering, open_model
from jaxllm.terminal.args import CompleteArgs
from jaxllm.terminal.session import Ask, is_interactive, run_session, tell

Start = Callable[[Answering], tuple[Ask, dict[str, Callable[[], str]]]]


def run_command(args: CompleteArgs, engine: EngineArgs | None, start: Start) -> int:
    """Opens the model, runs the session and closes it; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    if engine is not None:
        prepare_environment(os.environ, has_store=engine.executables is not None)
        if is_interactive():
            tell(f"starting {engine.model} in this process")
    model = open_model(args, engine)
    try:
        ask, commands = start(model)
        forget = " /reset forgets what was said," if "/reset" in commands else ""
        hint = f"{model.name}: Ctrl-C stops an answer,{forget} Ctrl-D or /quit ends"
        return run_session(ask, args.quick, commands, hint)
    finally:
        model.close()
