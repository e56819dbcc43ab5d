"""The command line. Sets the process's environment before anything imports jax; knows commands and exit codes only.

argparse, since `--help` takes a tenth of a second with it (Typer: 0.7 s) and since it reads flags with several values.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from jaxllm import __version__
from jaxllm.config.engine_args import DEFAULT_MODEL, HIDDEN, EngineArgs, engine_args
from jaxllm.config.errors import InputError
from jaxllm.config.server_args import NOT_BUILT_IN_SERVER, ServerArgs, refuse_not_built_in_server
from jaxllm.environment import prepare_environment
from jaxllm.options import (
    POSITIONAL,
    OptionParser,
    add_hidden_options,
    add_model_argument,
    add_options,
    name_flags,
    with_model,
)

USAGE_ERROR = 2
INTERRUPTED = 130  # what a shell reports of a program that SIGINT ended
BROKEN_PIPE = 141  # likewise SIGPIPE
API_KEY_VARIABLE = "VLLM_API_KEY"

_ENGINE_FIELDS = frozenset(field.name for field in dataclasses.fields(EngineArgs))
_SERVER_FIELDS = frozenset(field.name for field in dataclasses.fields(ServerArgs))
_HIDDEN = {**HIDDEN, **NOT_BUILT_IN_SERVER}


class Command(NamedTuple):
    """What follows `jaxllm`: one line about it, what may stand behind it, its flags, and what it does with them.

    `own` names the groups of flags that a plain --help shows in full.
    """

    help: str
    usage: str
    add_flags: Callable[[OptionParser], None]
    run: Callable[[dict[str, Any]], int]
    own: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; a user's mistake is one line on stderr and exit code 2."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:  # whoever read what we print has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except InputError as error:
        _fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        print("jaxllm: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _run(arguments: Sequence[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        print(_overview())
        return 0
    if first in ("-V", "--version"):
        print(f"jaxllm {__version__}")
        return 0
    name = _command_name(arguments)
    if name not in COMMANDS:  # the first word of a command of two
        print(_overview(name))
        return 0
    command = COMMANDS[name]
    parser = OptionParser(
        prog=f"jaxllm {name}", description=command.help, usage=f"jaxllm {name} {command.usage}".strip(), own=command.own
    )
    command.add_flags(parser)
    try:
        return command.run(parser.parse(arguments[len(name.split()) :]))
    except InputError as error:
        raise InputError(name_flags(str(error), parser.names())) from None


def _command_name(arguments: Sequence[str]) -> str:
    """Gives the command of one or two words that the arguments start with, or a first word that asks what may follow.

    Raises:
        InputError: there is no such command.
    """
    first, second = arguments[0], arguments[1] if len(arguments) > 1 else "--help"
    if first in COMMANDS:
        return first
    following = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
    if second in following:
        return f"{first} {second}"
    if not following:
        names = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
        raise InputError(f"there is no command {first!r}; there are: {', '.join(names)}")
    if second not in ("-h", "--help"):
        raise InputError(f"there is no command '{first} {second}'; there are: {', '.join(following)}")
    return first


def _overview(first: str = "") -> str:
    """Lists the commands, or those that start with a word."""
    shown = {name: command for name, command in COMMANDS.items() if name.startswith(first)}
    width = max(map(len, shown)) + 2
    commands = "\n".join(f"  {name:{width}}{command.help}" for name, command in shown.items())
    usage = f"usage: jaxllm {first or 'COMMAND'} {'COMMAND ' if first else ''}[--config FILE] [flags]"
    return f"{usage}\n\n{commands}\n\njaxllm COMMAND --help names a command's flags."


def _add_serve_flags(parser: OptionParser) -> None:
    add_model_argument(parser)
    add_options(parser, EngineArgs, "EngineConfig", grouped=True)
    add_options(parser, ServerArgs, "Frontend", grouped=True)
    add_hidden_options(parser, _HIDDEN)


def _serve(values: dict[str, Any]) -> int:
    engine, server = serve_args(values, os.environ)
    prepare_environment(os.environ, has_store=engine.executables is not None)
    from jaxllm.server.serve import serve  # --help, and a mistake in the flags, need none of it

    return serve(engine, server)


def serve_args(
    values: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> tuple[EngineArgs, ServerArgs]:
    """Sorts the values of `serve` to their owners, which check them. An API key may stand in the environment.

    Raises:
        InputError: a value out of range, two models, or a flag whose feature is not built yet.
    """
    given = with_model(values)
    if key := (environment or {}).get(API_KEY_VARIABLE):
        given.setdefault("api_key", (key,))
    for name in given.keys() & NOT_BUILT_IN_SERVER.keys():
        refuse_not_built_in_server(name, given[name])
    engine = engine_args({name: given[name] for name in given.keys() & (_ENGINE_FIELDS | HIDDEN.keys())})
    return engine, ServerArgs(**{name: given[name] for name in given.keys() & _SERVER_FIELDS})


def _fail(message: str) -> NoReturn:
    print(f"jaxllm: {message}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _found_in(module: str, help: str, usage: str, own: tuple[str, ...]) -> Command:
    """A command whose module is imported when it is called: its `add_flags` must not need jax, its `run` may."""

    def add_flags(parser: OptionParser) -> None:
        importlib.import_module(module).add_flags(parser)

    def run(values: dict[str, Any]) -> int:
        return importlib.import_module(module).run(values)

    return Command(help, usage, add_flags, run, own)


COMMANDS = {
    "serve": Command(
        f"serve a model over HTTP with OpenAI's API ({DEFAULT_MODEL} unless you name one)",
        "[MODEL] [flags]",
        _add_serve_flags,
        _serve,
        (POSITIONAL,),
    ),
    "chat": _found_in(
        "jaxllm.terminal.chat",
        "talk to a model, in this process or on a server",
        "[MODEL] [flags]",
        (POSITIONAL, "chat"),
    ),
    "complete": _found_in(
        "jaxllm.terminal.complete",
        "continue texts, in this process or on a server",
        "[MODEL] [flags]",
        (POSITIONAL, "complete"),
    ),
    "run-batch": _found_in(
        "jaxllm.server.run_batch",
        "answer a file of requests in OpenAI's batch format",
        "[MODEL] -i FILE -o FILE [flags]",
        (POSITIONAL, "run-batch"),
    ),
    "bench throughput": _found_in(
        "jaxllm.bench.throughput", "measure many requests sent at once", "[flags]", ("bench throughput",)
    ),
    "bench latency": _found_in(
        "jaxllm.bench.latency", "measure one batch of requests, again and again", "[flags]", ("bench latency",)
    ),
    "bench serve": _found_in(
        "jaxllm.bench.serve",
        "measure a running server: requests at a rate, times, goodput",
        "[flags]",
        ("bench serve",),
    ),
    "bench suite": _found_in(
        "jaxllm.bench.suite", "measure every workload beside what the device allows", "[flags]", ("bench suite",)
    ),
    "bench mesh": _found_in(
        "jaxllm.bench.mesh", "measure the same requests on several shapes of the mesh", "[flags]", ("bench mesh",)
    ),
    "compile": _found_in(
        "jaxllm.terminal.compile",
        "compile a model's programs into a folder, so that starts need not",
        "[MODEL] --output DIR [flags]",
        (POSITIONAL, "compile"),
    ),
    "convert": _found_in(
        "jaxllm.terminal.convert",
        "write a model as the engine keeps it, to open faster and without the original",
        "[MODEL] --output DIR [flags]",
        (POSITIONAL, "convert"),
    ),
    "plan": _found_in(
        "jaxllm.planning.command",
        "say which mesh shape, batch and budget to take for a model, devices and traffic",
        "[MODEL] --devices 8xA100-80G [flags]",
        (POSITIONAL, "plan"),
    ),
    "simulate": _found_in(
        "jaxllm.simulate.command",
        "say how an engine would do with some traffic: throughput, times, queue, KV over time",
        "[MODEL] --devices 2xH200 [flags]",
        (POSITIONAL, "simulate"),
    ),
    "calibrate": _found_in(
        "jaxllm.calibrate.command",
        "measure steps on this machine and describe its device for plan and simulate",
        "[MODEL] --output FILE [flags]",
        (POSITIONAL, "calibrate"),
    ),
    "diagnose": _found_in(
        "jaxllm.diagnose.command",
        "say what limits an engine, from a file of bench or a running server",
        "FILE|URL [flags]",
        (POSITIONAL, "diagnose"),
    ),
    "collect-env": _found_in("jaxllm.terminal.collect_env", "say what a report of a defect should say", "", ()),
}
