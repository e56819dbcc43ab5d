"""Process 0 launches what all have compiled, and joins what they read."""

import threading
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.buckets import StepShape
from jaxllm.engine.processes.leader import Answers, CompiledElsewhere, compile_request, requested_key
from jaxllm.engine.processes.messages import Answer, Compiled, CompileFailed
from jaxllm.engine.sampler_inputs import SamplerShape
from jaxllm.engine.step_compiler import PromptScorerKey

SHAPE = StepShape(4, 4, 1, "greedy")


class TwoFollowers:
    """Stands in for a channel: a test speaks for the other processes."""

    peers = (1, 2)

    def __init__(self):
        self.takers: dict[type, Any] = {}

    def on(self, kind: type, take: Any) -> None:
        self.takers[kind] = take

    def name(self, rank: int) -> str:
        return f"process {rank}"

    def say(self, rank: int, message: Any) -> None:
        self.takers[type(message)](rank, message)


def test_a_program_is_everywhere_when_the_last_process_has_it():
    channel: Any = TwoFollowers()
    elsewhere = CompiledElsewhere(channel)
    channel.say(1, Compiled(repr(SHAPE)))
    assert not elsewhere.has(SHAPE)
    threading.Timer(0.05, channel.say, (2, Compiled(repr(SHAPE)))).start()
    elsewhere.wait(SHAPE)
    assert elsewhere.has(SHAPE)
    assert not elsewhere.has(SHAPE._replace(variant="logits"))


def test_a_program_that_one_process_cannot_compile_is_an_error_and_may_be_asked_for_again():
    channel: Any = TwoFollowers()
    elsewhere = CompiledElsewhere(channel)
    channel.say(2, CompileFailed(repr(SHAPE), "RuntimeError: no room"))
    with pytest.raises(RuntimeError, match="process 2: RuntimeError: no room"):
        elsewhere.wait(SHAPE)
    for rank in (1, 2):
        channel.say(rank, Compiled(repr(SHAPE)))
    elsewhere.wait(SHAPE)


@pytest.mark.parametrize("key", [SHAPE, SamplerShape(4, filters=True), PromptScorerKey(32, 16, 8)])
def test_a_key_is_asked_for_as_what_it_is(key: Any):
    found = requested_key(compile_request(key))
    assert found == key
    assert type(found) is type(key)


def test_answers_of_steps_that_nobody_read_are_passed_over():
    channel: Any = TwoFollowers()
    answers = Answers(channel, [2])
    for number in (1, 2, 3):
        channel.say(2, Answer(number, [np.asarray([[number]])]))
    assert answers.wait(2)[2][0].tolist() == [[2]]
    assert answers.wait(3)[2][0].tolist() == [[3]]
