"""The packaged model, started by the command itself, in this process."""

import _thread
import signal
import threading
from collections.abc import Iterator

import pytest

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.terminal.args import CompleteArgs
from jaxllm.terminal.chat import Conversation
from jaxllm.terminal.local import LocalModel

ENGINE = EngineArgs(num_gpu_blocks_override=32, max_model_len=256, max_num_seqs=1, use_tqdm_on_load=False)


@pytest.fixture(scope="module")
def model() -> Iterator[LocalModel]:
    model = LocalModel(ENGINE, CompleteArgs(temperature=0))
    yield model
    model.close()


def test_a_conversation_remembers_what_was_said(model: LocalModel):
    conversation, pieces = Conversation(model, None), []
    conversation.ask("What is the capital of France?", pieces.append)
    assert "".join(pieces) == "The capital of France is Paris."
    assert len(pieces) > 3  # it came bit by bit
    pieces.clear()
    conversation.ask("And of Italy?", pieces.append)
    assert "Rome" in "".join(pieces)


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """A process that a shell started in the background ignores Ctrl-C, and so would the tests in it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_answer_and_the_model_answers_on(model: LocalModel, heeds_ctrl_c: None):
    pieces: list[str] = []

    def press_after_some(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            threading.Thread(target=_thread.interrupt_main).start()

    with pytest.raises(KeyboardInterrupt):
        model.chat([{"role": "user", "content": "Count from 1 to 1000."}], press_after_some)
    assert len(pieces) < 100
    pieces.clear()
    model.complete("1, 2, 3, 4,", pieces.append)
    assert "".join(pieces).startswith(" 5, 6, 7")


def test_a_conversation_that_has_grown_too_long_is_told(model: LocalModel):
    with pytest.raises(InputError, match=r"the prompt has [\d,]+ tokens, but max_model_len 256"):
        model.chat([{"role": "user", "content": "again " * 300}], lambda text: None)
