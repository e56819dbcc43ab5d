"""`jaxllm complete`: texts and their continuations, each by itself. Knows no model and no server."""

from typing import Any

from jaxllm.options import OptionParser
from jaxllm.terminal.answers import Answering
from jaxllm.terminal.args import CompleteArgs, add_terminal_flags, split_values
from jaxllm.terminal.command import run_command


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_terminal_flags(parser, CompleteArgs, "complete")


def run(values: dict[str, Any]) -> int:
    """Continues texts until the input ends; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    args, engine = split_values(CompleteArgs, values)

    def start(model: Answering):
        return model.complete, {}

    return run_command(args, engine, start)
