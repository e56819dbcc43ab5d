"""Conversations and completions over a stand-in for the model, as typed, piped, or asked once."""

import builtins
import io
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from jaxllm.cli import main
from jaxllm.config.errors import InputError
from jaxllm.terminal import command
from jaxllm.terminal.answers import AnswerLost, Message, Write
from jaxllm.terminal.chat import Conversation

Step = str | BaseException


class Parrot:
    """Stands in for a model: answers with the number of messages and the last one; what starts with ! goes wrong."""

    name = "parrot"

    def __init__(self) -> None:
        self.is_closed = False

    def chat(self, messages: Sequence[Message], write: Write) -> None:
        self.complete(f"{len(messages)}:{messages[-1]['content']}", write)

    def complete(self, prompt: str, write: Write) -> None:
        text = prompt.partition(":")[2] or prompt
        if text == "!refused":
            raise InputError("max_tokens is too large")
        for piece in prompt:
            write(piece)
        if text == "!interrupted":
            raise KeyboardInterrupt
        if text == "!lost":
            raise AnswerLost("the connection ended")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def parrot(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parrot]:
    model = Parrot()
    monkeypatch.setattr(command, "open_model", lambda args, engine: model)
    monkeypatch.setattr(command, "prepare_environment", lambda environment, has_store: None)
    yield model
    assert model.is_closed


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `jaxllm` with flags and piped input; gives exit code, stdout and stderr."""

    def call(*arguments: str, piped: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        captured = capsys.readouterr()
        return int(exit.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `jaxllm chat` with somebody at the terminal who types these lines, or presses Ctrl-C."""

    def call(*lines: Step) -> tuple[int, str, str]:
        left = iter([*lines, EOFError()])

        def read(prompt: str) -> str:
            assert prompt == "> "
            line = next(left)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        for module in ("command", "session"):
            monkeypatch.setattr(f"jaxllm.terminal.{module}.is_interactive", lambda: True)
        with pytest.raises(SystemExit) as exit:
            main(["chat"])
        captured = capsys.readouterr()
        return int(exit.value.code or 0), captured.out, captured.err

    return call


def test_one_question_is_answered_and_nothing_else_is_printed(parrot: Parrot, run: Callable):
    assert run("chat", "-q", "hello") == (0, "1:hello\n", "")
    parrot.is_closed = False
    assert run("chat", "--quick", "hello", "--system-prompt", "be kind") == (0, "2:hello\n", "")
    parrot.is_closed = False
    assert run("complete", "-q", "once upon") == (0, "once upon\n", "")


def test_piped_lines_are_turns_of_one_conversation(parrot: Parrot, run: Callable):
    assert run("chat", piped="one\n\ntwo\n/reset\nthree") == (0, "1:one\n3:two\n1:three\n", "")


def test_piped_texts_are_continued_each_by_itself(parrot: Parrot, run: Callable):
    assert run("complete", piped="one\ntwo\n/quit\nthree\n") == (0, "one\ntwo\n", "")


def test_a_refused_text_ends_a_pipe_with_one_line(parrot: Parrot, run: Callable):
    assert run("chat", piped="!refused\nmore\n") == (2, "", "jaxllm: --max-tokens is too large\n")


def test_a_lost_answer_has_an_exit_code_of_its_own(parrot: Parrot, run: Callable):
    code, out, err = run("chat", "-q", "!lost")
    assert (code, out) == (1, "1:!lost\n")
    assert err.strip() == "jaxllm: the connection ended"


def test_an_interrupted_answer_ends_a_single_question_as_a_shell_expects(parrot: Parrot, run: Callable):
    assert run("chat", "-q", "!interrupted") == (130, "1:!interrupted\n", "")


def test_ctrl_c_ends_an_answer_and_not_the_session(parrot: Parrot, typed: Callable):
    code, out, _ = typed("hello", "!interrupted", "again")
    assert (code, out) == (0, "1:hello\n3:!interrupted\n5:again\n\n")


def test_ctrl_c_at_the_prompt_tells_how_to_leave(parrot: Parrot, typed: Callable):
    code, out, err = typed(KeyboardInterrupt(), "hello")
    assert (code, out) == (0, "1:hello\n\n")
    assert "Ctrl-D or /quit ends the session" in err


def test_a_mistake_at_the_terminal_is_told_and_the_question_forgotten(parrot: Parrot, typed: Callable):
    code, out, err = typed("!refused", "hello", "/rest", "/reset", "hello", "/quit", "never")
    assert (code, out) == (0, "1:hello\n1:hello\n")
    assert "jaxllm: max_tokens is too large" in err
    assert "there is no command /rest; there are: /reset, /quit" in err
    assert "the conversation starts anew" in err


def test_a_cut_answer_counts_as_said_and_one_that_never_began_does_not():
    conversation = Conversation(Parrot(), "be kind")
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("!interrupted", lambda text: None)
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]
    with pytest.raises(InputError):
        conversation.ask("!refused", lambda text: None)
    assert conversation.messages[-1] == {"role": "assistant", "content": "2:!interrupted"}
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "be kind"}]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-p", "2"], "--top-p must be in (0, 1]"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["--model-name", "x"], "--model-name belongs to a server: give its --url too"),
        (["--url", "http://h/v1", "--dtype", "half"], "--dtype='half' has no effect on the server"),
        (["x", "--url", "http://h/v1"], "--model='x' has no effect on the server"),
        (["-pp", "2"], "--pipeline-parallel-size=2 is not supported yet"),
        (["--sytem-prompt", "x"], "unknown flag --sytem-prompt; did you mean --system-prompt?"),
    ],
)
def test_a_mistake_in_the_flags_is_told_before_anything_is_started(flags: list[str], says: str, run: Callable):
    code, out, err = run("chat", *flags)
    assert (code, out) == (2, "")
    assert says in err
