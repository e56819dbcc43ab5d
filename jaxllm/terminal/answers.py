"""What answers at a terminal: a model in this process or on a server. Knows neither; only how both are asked."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxllm.config.engine_args import EngineArgs
from jaxllm.terminal.args import CompleteArgs

Message = Mapping[str, str]
Write = Callable[[str], None]


class AnswerLost(RuntimeError):
    """An answer could not be given by no fault of the user's: the message is one line with the cause."""


class Answering(Protocol):
    """A model that writes its answer piece by piece. KeyboardInterrupt ends an answer, and the model stays usable."""

    name: str

    def chat(self, messages: Sequence[Message], write: Write) -> None:
        """Answers the last message of a conversation."""
        ...

    def complete(self, prompt: str, write: Write) -> None:
        """Continues a text."""
        ...

    def close(self) -> None: ...


def open_model(args: CompleteArgs, engine: EngineArgs | None) -> Answering:
    """Starts the engine, or finds the server.

    Raises:
        InputError: the model does not start, or the server does not answer.
    """
    if engine is None:
        from jaxllm.terminal.remote import RemoteModel

        return RemoteModel(args)
    from jaxllm.terminal.local import LocalModel

    return LocalModel(engine, args)
