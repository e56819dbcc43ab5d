"""What the processes of one engine say to each other, and its bytes. Knows steps' fields; no sockets, no order.

Plain data only: whoever can reach the port can send numbers, but no code.
"""

from typing import Any

import msgspec
import numpy as np

from jaxllm.engine.buckets import StepShape
from jaxllm.engine.input_builder import PackedStep, PromptScoring
from jaxllm.engine.sampler_builder import CountReset, PackedSampling
from jaxllm.engine.sampler_inputs import SamplerLayout, SamplerShape


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """A process comes: its rank, how many it expects, where it runs, and what all must agree in."""

    rank: int
    nnodes: int
    host: str
    flags: dict[str, str]


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """All have come: the hosts, by rank."""

    hosts: list[str]


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """They cannot work together, in one line."""

    reason: str


class Facts(msgspec.Struct, tag="facts", array_like=True):
    """What the sender's programs depend on, and the KV blocks that it has room for."""

    facts: dict[str, str]
    num_blocks: int


class Agreed(msgspec.Struct, tag="agreed", array_like=True):
    """The number of blocks that every process has room for."""

    num_blocks: int


class Started(msgspec.Struct, tag="started", array_like=True):
    """The sender has its weights and can run steps."""


class CompileStep(msgspec.Struct, tag="compile step", array_like=True, frozen=True):
    """A forward pass that will be needed."""

    shape: StepShape


class CompileSampler(msgspec.Struct, tag="compile sampler", array_like=True, frozen=True):
    """A sampler that will be needed."""

    shape: SamplerShape


class CompileScorer(msgspec.Struct, tag="compile scorer", array_like=True, frozen=True):
    """A scorer of prompts that will be needed."""

    num_tokens: int
    num_scored: int
    num_best: int


class Compiled(msgspec.Struct, tag="compiled", array_like=True):
    """The sender has a program, by its key's repr."""

    key: str


class CompileFailed(msgspec.Struct, tag="compile failed", array_like=True):
    """The sender cannot compile a program."""

    key: str
    error: str


class Sampling(msgspec.Struct, tag="sampling", array_like=True):
    """PackedSampling without what each process knows itself."""

    shape: SamplerShape
    packed: np.ndarray
    count_resets: tuple[CountReset, ...]


class Scoring(msgspec.Struct, tag="scoring", array_like=True):
    """PromptScoring without the requests."""

    index_and_token: np.ndarray
    num_best: int


class Step(msgspec.Struct, tag="step", array_like=True):
    """A step to be launched."""

    number: int
    shape: StepShape
    packed: np.ndarray
    copies: tuple[tuple[tuple[int, int], ...], ...]
    sampling: Sampling | None
    prompt: Scoring | None


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """What a step gave on the data ranks that the sender answers for: the leaves of its answer, stacked by rank."""

    number: int
    leaves: list[np.ndarray]


class Reset(msgspec.Struct, tag="reset", array_like=True):
    """Device state is to be made anew."""


class Heartbeat(msgspec.Struct, tag="heartbeat", array_like=True):
    """The sender lives."""


class Gone(msgspec.Struct, tag="gone", array_like=True):
    """The engine ends because of a process, in one line."""

    line: str


class Leaving(msgspec.Struct, tag="leaving", array_like=True):
    """The sender was told to stop."""


class Stop(msgspec.Struct, tag="stop", array_like=True):
    """The engine was closed."""


type Message = (
    Hello
    | Welcome
    | Refused
    | Facts
    | Agreed
    | Started
    | CompileStep
    | CompileSampler
    | CompileScorer
    | Compiled
    | CompileFailed
    | Step
    | Answer
    | Reset
    | Heartbeat
    | Gone
    | Leaving
    | Stop
)
type CompileRequest = CompileStep | CompileSampler | CompileScorer


def encode(message: Message) -> bytes:
    """Gives a message's bytes."""
    return _encoder.encode(message)


def decode(content: bytes | bytearray) -> Message:
    """Reads a message.

    Raises:
        ValueError: these are no bytes of a message.
    """
    return _decoder.decode(content)


def to_step(step: PackedStep, number: int) -> Step:
    """Writes a packed step as a message."""
    sampling, prompt = step.sampling, step.prompt
    return Step(
        number,
        step.shape,
        step.packed,
        step.copies,
        sampling and Sampling(sampling.layout.shape, sampling.packed, sampling.count_resets),
        prompt and Scoring(prompt.index_and_token, prompt.num_best),
    )


def to_packed(step: Step, layout: SamplerLayout) -> PackedStep:
    """Reads a packed step from a message; `layout` is of any sampler of the engine."""
    sampling, prompt = step.sampling, step.prompt
    return PackedStep(
        step.shape,
        step.packed,
        step.copies,
        sampling and PackedSampling(layout._replace(shape=sampling.shape), sampling.packed, sampling.count_resets),
        prompt and PromptScoring(prompt.index_and_token, prompt.num_best, ()),
    )


def _to_plain(value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} is no part of a message")
    return value.dtype.str, value.shape, np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _from_plain(kind: type, value: Any) -> np.ndarray:
    dtype, shape, content = value
    if kind is not np.ndarray or np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"{dtype} is no type of an array in a message")
    return np.frombuffer(content, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(Message.__value__, dec_hook=_from_plain)
