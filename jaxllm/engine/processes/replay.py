"""The loop of the processes other than 0: each call on process 0's runner is made here too. Knows no requests."""

import logging
import queue
import threading
from collections.abc import Hashable

from jaxllm.config.errors import InputError
from jaxllm.engine.model_runner import DeviceTokens, ModelRunner
from jaxllm.engine.processes.channel import Channel
from jaxllm.engine.processes.leader import requested_key
from jaxllm.engine.processes.messages import (
    Answer,
    Compiled,
    CompileFailed,
    CompileSampler,
    CompileScorer,
    CompileStep,
    Reset,
    Step,
    Stop,
    to_packed,
)
from jaxllm.engine.sampler_inputs import SamplerLayout, SamplerShape
from jaxllm.engine.step_compiler import StepCompiler

logger = logging.getLogger(__name__)


class TellCompiled:
    """Tells process 0 what this one has compiled."""

    def __init__(self, channel: Channel):
        self._channel = channel

    def has(self, key: Hashable) -> bool:
        """Nothing is chosen here: process 0 does that."""
        return True

    def tell(self, key: Hashable) -> None:
        """Sends the key."""
        self._channel.send(Compiled(repr(key)))


def replay(runner: ModelRunner, compiler: StepCompiler, channel: Channel) -> None:
    """Makes every call that process 0 makes, until it stops."""
    reader = _Reader(runner, channel)
    layout = SamplerLayout(SamplerShape(1), runner.program.decoder.cfg.vocab_size, compiler.settings.processors)
    while True:
        message = channel.receive(0)
        try:
            match message:
                case Step():
                    reader.put(message.number, runner.execute(to_packed(message, layout)))
                case CompileStep() | CompileSampler() | CompileScorer():
                    _compile(compiler, channel, requested_key(message))
                case Reset():
                    runner.reset()
                case Stop():
                    channel.expect_end()
                    reader.close()
                    return
                case _:
                    raise RuntimeError(f"process 0 sent {type(message).__name__}")
        except Exception as error:
            channel.end_unless_lost(describe_failure(channel, error))


def describe_failure(channel: Channel, error: BaseException) -> str:
    """Says in one line why this process ends the engine."""
    lines = str(error).strip().splitlines() or ["no message"]
    cause = lines[0] if isinstance(error, InputError) else f"{type(error).__name__}: {lines[0]}"
    return f"{channel.name(channel.rank)} failed: {cause}"


def _compile(compiler: StepCompiler, channel: Channel, key: Hashable) -> None:
    try:
        compiler.make(key)
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        channel.send(CompileFailed(repr(key), f"{type(error).__name__}: {lines[0]}"))


class _Reader:
    """Waits for steps in their order, on a thread of its own, and sends what this process answers for."""

    def __init__(self, runner: ModelRunner, channel: Channel):
        self._channel = channel
        self._answers = bool(runner.ranks.own_ranks)
        self._launched: queue.SimpleQueue[tuple[int, DeviceTokens] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="jaxllm-read", daemon=True)
        self._thread.start()

    def put(self, number: int, tokens: DeviceTokens) -> None:
        self._launched.put((number, tokens))

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (launched := self._launched.get()) is not None:
            number, tokens = launched
            try:
                leaves = tokens.leaves()  # also where nobody waits for them: a step that failed ends the engine
            except Exception as error:
                self._channel.end_unless_lost(describe_failure(self._channel, error))
                return
            if self._answers:
                self._channel.send(Answer(number, leaves))
