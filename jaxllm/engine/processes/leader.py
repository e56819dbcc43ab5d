"""Process 0's runner: each call goes to the other processes before this one makes it too. Knows no requests.

No program is launched before every process has compiled it: a collective would wait for the slowest compiler, and give
up on it. What raises before a step is sent concerns this step alone; afterwards the processes can no longer be brought
to the same state, so that all end.
"""

import queue
import threading
from collections.abc import Hashable, Sequence

import numpy as np

from jaxllm.config.errors import InputError
from jaxllm.engine.buckets import StepShape
from jaxllm.engine.input_builder import PackedStep
from jaxllm.engine.model_runner import DeviceTokens, ModelRunner, StepScores
from jaxllm.engine.processes.channel import Channel
from jaxllm.engine.processes.messages import (
    Answer,
    Compiled,
    CompileFailed,
    CompileRequest,
    CompileSampler,
    CompileScorer,
    CompileStep,
    Message,
    Reset,
    to_step,
)
from jaxllm.engine.sampler_inputs import SamplerShape
from jaxllm.engine.step_compiler import PromptScorerKey, StepCompiler
from jaxllm.mesh.adopt import Adopted
from jaxllm.models.forward import Weights
from jaxllm.models.given import Params


class CompiledElsewhere:
    """What the other processes have compiled. Their messages arrive on threads of the channel."""

    def __init__(self, channel: Channel):
        self._compiled: dict[int, set[str]] = {rank: set() for rank in channel.peers}
        self._failed: dict[str, str] = {}
        self._everywhere: set[Hashable] = set()
        self._news = threading.Condition()
        self._channel = channel
        channel.on(Compiled, self._note)
        channel.on(CompileFailed, self._note_failure)

    def has(self, key: Hashable) -> bool:
        """Says whether each of them has a program."""
        if key in self._everywhere:
            return True
        name = repr(key)
        if all(name in compiled for compiled in self._compiled.values()):
            self._everywhere.add(key)
            return True
        return False

    def tell(self, key: Hashable) -> None:
        """Nobody needs to know what process 0 has."""

    def wait(self, key: Hashable) -> None:
        """Waits until each of them has it.

        Raises:
            RuntimeError: one of them cannot compile it.
        """
        name = repr(key)
        with self._news:
            self._news.wait_for(lambda: self.has(key) or name in self._failed)
            if name in self._failed:
                raise RuntimeError(self._failed.pop(name))

    def _note(self, rank: int, message: Message) -> None:
        assert isinstance(message, Compiled)
        with self._news:
            self._compiled[rank].add(message.key)
            self._news.notify_all()

    def _note_failure(self, rank: int, message: Message) -> None:
        assert isinstance(message, CompileFailed)
        with self._news:
            self._failed[message.key] = f"{self._channel.name(rank)}: {message.error}"
            self._news.notify_all()


class Answers:
    """What other processes read of steps, by the step's number."""

    def __init__(self, channel: Channel, readers: Sequence[int]):
        self._arrived: dict[int, queue.SimpleQueue[Answer]] = {rank: queue.SimpleQueue() for rank in readers}
        channel.on(Answer, self._take)

    def wait(self, number: int) -> dict[int, list[np.ndarray]]:
        """Waits for those of a step, by process; steps have to be asked for in order."""
        found = {}
        for rank, arrived in self._arrived.items():
            answer = arrived.get()
            while answer.number < number:  # of a step that nobody wanted to read
                answer = arrived.get()
            found[rank] = answer.leaves
        return found

    def _take(self, rank: int, message: Message) -> None:
        assert isinstance(message, Answer)
        self._arrived[rank].put(message)


class JoinedTokens:
    """A step's answer, of which other processes have a part."""

    def __init__(self, own: DeviceTokens, number: int, runner: "LeadingRunner"):
        self._own, self._number, self._runner = own, number, runner
        self._leaves: list[np.ndarray] | None = None

    def read(self) -> list[list[int]]:
        return self._read()[0].tolist()

    def read_scores(self) -> StepScores | None:
        return self._own.scores_of(self._read())

    def _read(self) -> list[np.ndarray]:
        if self._leaves is None:
            self._leaves = self._runner.join(self._number, self._own)
        return self._leaves


class LeadingRunner:
    """A runner of which every process runs its part."""

    def __init__(self, runner: ModelRunner, compiler: StepCompiler, channel: Channel, elsewhere: CompiledElsewhere):
        self._runner, self._compiler = runner, compiler
        self._channel, self._elsewhere = channel, elsewhere
        owners = runner.ranks.owners
        self._ranks_of = {process: runner.ranks.ranks_of(process) for process in sorted({*owners})}
        self._answers = Answers(channel, [process for process in self._ranks_of if process != channel.rank])
        self._num_ranks = len(owners)
        self._number = 0

    def execute(self, step: PackedStep) -> JoinedTokens:
        """Launches a step in every process, when all have compiled what it needs."""
        self._compile_everywhere(self._runner.programs(step))
        self._number += 1
        self._channel.send(to_step(step, self._number))
        try:
            own = self._runner.execute(step)
        except Exception as error:
            self._end(error)
            raise
        return JoinedTokens(own, self._number, self)

    def reset(self) -> None:
        """Makes new, empty device state in every process."""
        self._channel.send(Reset())
        self._runner.reset()

    @property
    def weights(self) -> Weights:
        """Raises InputError: no process has all of them."""
        raise self._own_weights()

    def take_weights(self, params: Params, casts: bool = True) -> Adopted:
        """Raises InputError, as `weights` does."""
        raise self._own_weights()

    def set_weights(self, weights: Weights) -> None:
        """Raises InputError, as `weights` does."""
        raise self._own_weights()

    def _own_weights(self) -> InputError:
        return InputError(
            f"nnodes={self._channel.count}: each process has its own part of the weights, so that they can be neither "
            "handed out nor replaced; start anew with another checkpoint, or use one process"
        )

    def join(self, number: int, own: DeviceTokens) -> list[np.ndarray]:
        """Waits for all parts of a step's answer; gives its leaves, of all data ranks."""
        try:
            own_leaves = own.leaves()
        except Exception as error:
            self._end(error)
            raise
        if list(self._ranks_of) == [self._channel.rank]:
            return own_leaves
        parts = {self._channel.rank: own_leaves, **self._answers.wait(number)}
        joined = []
        for i, leaf in enumerate(own_leaves):
            whole = np.empty((self._num_ranks, *leaf.shape[1:]), leaf.dtype)
            for process, ranks in self._ranks_of.items():
                whole[ranks] = parts[process][i]
            joined.append(whole)
        return joined

    def _compile_everywhere(self, keys: list[Hashable]) -> None:
        missing = [key for key in keys if not self._elsewhere.has(key)]
        for key in missing:
            self._channel.send(compile_request(key))
        for key in keys:
            self._compiler.make(key)
        for key in missing:
            self._elsewhere.wait(key)

    def _end(self, error: Exception) -> None:
        lines = str(error).strip().splitlines() or ["no message"]
        self._channel.end_unless_lost(f"a step failed in process 0: {type(error).__name__}: {lines[0]}")


def compile_request(key: Hashable) -> CompileRequest:
    """Gives the message that asks for a program."""
    match key:
        case StepShape():
            return CompileStep(key)
        case SamplerShape():
            return CompileSampler(key)
        case PromptScorerKey():
            return CompileScorer(*key)
    raise TypeError(f"{key!r} is no key of a program")


def requested_key(request: CompileRequest) -> Hashable:
    """Gives the compiler's key of the program that a message asks for."""
    if isinstance(request, CompileScorer):
        return PromptScorerKey(request.num_tokens, request.num_scored, request.num_best)
    return request.shape
