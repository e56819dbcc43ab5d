"""Lines in, answers out, at a terminal or in a pipe. Knows what is typed and shown; no model and no server."""

import sys
from collections.abc import Callable, Iterator

from jaxllm.config.errors import InputError
from jaxllm.terminal.answers import AnswerLost, Write

LOST = 1  # exit code
INTERRUPTED = 130
Ask = Callable[[str, Write], None]


def run_session(ask: Ask, quick: str | None, commands: dict[str, Callable[[], str]], hint: str) -> int:
    """Answers one text, or every line until the input ends; gives the exit code.

    `commands` are words such as /reset with what they do; what they return is shown. Ctrl-C ends an answer, and at a
    prompt the line that is being typed.

    Raises:
        InputError: a text is refused, where nobody sits at a terminal to give another one.
    """
    if quick is not None:
        return _answer(ask, quick)
    if not is_interactive():
        return _answer_all(ask, commands)
    tell(hint)
    for line in _typed_lines():
        if line in ("/quit", "/exit"):
            break
        if line in commands:
            tell(commands[line]())
        elif line.startswith("/") and line[1:].isalpha():
            tell(f"there is no command {line}; there are: {', '.join([*commands, '/quit'])}")
        else:
            try:
                _answer(ask, line)
            except InputError as error:
                tell(f"jaxllm: {error}")
    return 0


def is_interactive() -> bool:
    """Says whether a person types and reads."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def tell(text: str) -> None:
    """Says something that is no answer."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Writes a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _answer_all(ask: Ask, commands: dict[str, Callable[[], str]]) -> int:
    for line in sys.stdin:
        text = line.rstrip("\n")
        if text in ("/quit", "/exit"):
            break
        if text in commands:
            commands[text]()
        elif text.strip():
            code = _answer(ask, text)
            if code != 0:
                return code
    return 0


def _answer(ask: Ask, text: str) -> int:
    """Shows one answer, its last line ended; gives the exit code."""
    code = 0
    try:
        ask(text, show)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except AnswerLost as error:
        tell(f"\njaxllm: {error}")
        code = LOST
    show("\n")
    return code


def _typed_lines() -> Iterator[str]:
    import readline  # noqa: F401  lets input() edit the line and remember the ones before

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            show("\n")
            return
        except KeyboardInterrupt:
            tell("\nCtrl-D or /quit ends the session")
            continue
        if line:
            yield line
