"""The command line. Sets the process's environment before anything imports jax; knows commands and exit codes only.

argparse, since `--help` takes a tenth of a second with it (Typer: 0.7 s) and since it reads flags with several values.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxllm import __version__
from jaxllm.config.engine_args import DEFAULT_MODEL, NOT_BUILT, EngineArgs, engine_args
from jaxllm.config.errors import InputError
from jaxllm.config.server_args import NOT_BUILT_IN_SERVER, ServerArgs, refuse_not_built_in_server
from jaxllm.environment import prepare_environment
from jaxllm.options import OptionParser, add_hidden_options, add_options, name_flags

USAGE_ERROR = 2
INTERRUPTED = 130  # what a shell reports of a program that SIGINT ended

_ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(EngineArgs))
_SERVER_FIELDS = frozenset(field.name for field in dataclasses.fields(ServerArgs))
_REFUSED = {**NOT_BUILT, **NOT_BUILT_IN_SERVER}
_FLAGS = _ENGINE_FIELDS | _SERVER_FIELDS | _REFUSED.keys()


class Command(NamedTuple):
    """What follows `jaxllm`: one line about it, its flags, and what it does with their values."""

    help: str
    add_flags: Callable[[OptionParser], None]
    run: Callable[[dict[str, Any]], int]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        sys.exit(_run(sys.argv[1:] if arguments is None else arguments))
    except InputError as error:
        _fail(name_flags(" ".join(str(error).split()), _FLAGS))
    except KeyboardInterrupt:
        print("jaxllm: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _run(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(f"jaxllm {__version__}")
        return 0
    if name not in COMMANDS:
        raise InputError(f"there is no command {name!r}; there are: {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    parser = OptionParser(prog=f"jaxllm {name}", description=command.help, usage=f"jaxllm {name} [flags] ...")
    command.add_flags(parser)
    return command.run(parser.parse(arguments[1:]))


def _overview() -> str:
    commands = "\n".join(f"  {name:8}{command.help}" for name, command in COMMANDS.items())
    return f"usage: jaxllm COMMAND [flags]\n\n{commands}\n\njaxllm COMMAND --help names a command's flags."


def _add_serve_flags(parser: OptionParser) -> None:
    parser.usage = "jaxllm serve [MODEL] [flags]"
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    add_options(parser, EngineArgs, "engine")
    add_options(parser, ServerArgs, "server")
    add_hidden_options(parser, _REFUSED)


def _serve(values: dict[str, Any]) -> int:
    engine, server = serve_args(values)
    prepare_environment(os.environ)
    from jaxllm.server.serve import serve  # --help, and a mistake in the flags, need none of it

    return serve(engine, server)


def serve_args(values: Mapping[str, Any]) -> tuple[EngineArgs, ServerArgs]:
    """Sorts the values of `serve` to their owners, which check them.

    Raises:
        InputError: a value out of range, two models, or a flag whose feature is not built yet.
    """
    given = dict(values)
    positional = given.pop("positional_model", None)
    if positional is not None and given.setdefault("model", positional) != positional:
        raise InputError(f"two models are given, {positional!r} and model={given['model']!r}: keep one")
    for name in given.keys() & NOT_BUILT_IN_SERVER.keys():
        refuse_not_built_in_server(name, given[name])
    engine = engine_args({name: given[name] for name in given.keys() & (_ENGINE_FIELDS | NOT_BUILT.keys())})
    return engine, ServerArgs(**{name: given[name] for name in given.keys() & _SERVER_FIELDS})


def _fail(message: str) -> NoReturn:
    print(f"jaxllm: {message}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


COMMANDS = {
    "serve": Command(
        f"serve a model over HTTP with OpenAI's API ({DEFAULT_MODEL} unless you name one)", _add_serve_flags, _serve
    ),
}
