"""`jaxllm chat`: a conversation, turn by turn. Knows its history; no model, no server."""

from typing import Any

from jaxllm.options import OptionParser
from jaxllm.terminal.answers import Answering, Write
from jaxllm.terminal.args import ChatArgs, add_terminal_flags, split_values
from jaxllm.terminal.command import run_command


def add_flags(parser: OptionParser) -> None:
    """Adds the command's flags and the engine's."""
    add_terminal_flags(parser, ChatArgs, "chat")


def run(values: dict[str, Any]) -> int:
    """Talks until the input ends; gives the exit code.

    Raises:
        InputError: a mistake of the user's.
    """
    args, engine = split_values(ChatArgs, values)

    def start(model: Answering):
        conversation = Conversation(model, args.system_prompt)
        return conversation.ask, {"/reset": conversation.reset}

    return run_command(args, engine, start)


class Conversation:
    """A model and what was said so far."""

    def __init__(self, model: Answering, system_prompt: str | None):
        self._model = model
        self._first = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self.messages: list[dict[str, str]] = list(self._first)

    def ask(self, question: str, write: Write) -> None:
        """Says something and writes the answer. Of an answer that was cut short, what was seen of it counts as said."""
        pieces: list[str] = []

        def seen(text: str) -> None:
            pieces.append(text)
            write(text)

        asked = [*self.messages, {"role": "user", "content": question}]
        try:
            self._model.chat(asked, seen)
        finally:
            answer = "".join(pieces)
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": answer}]

    def reset(self) -> str:
        """Forgets what was said."""
        self.messages = list(self._first)
        return "forgotten; the conversation starts anew"
