"""The inputs of a step's sampler. Knows the fields and their shapes; who fills and who reads them live elsewhere."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np

from jaxllm.config.logits_processor import LogitsProcessor, as_words
from jaxllm.engine import packing
from jaxllm.engine.packing import FieldShape

WHOLE_VOCABULARY = -1  # as a number of best tokens
NO_SCORES = -2
ANY_TOKEN = -1  # an edit's condition that always holds


class ProcessorShape(NamedTuple):
    """A traced logits processor in use: its name, and for how many rows it is compiled."""

    name: str
    num_rows: int


class SamplerShape(NamedTuple):
    """What a compiled sampler is keyed by: B requests and the features in use, sizes from short lists.

    filters: min_p, top_k or top_p. penalties: any of the three. num_edits: places where a number is added to a logit.
    masked: some row may choose among listed tokens only. num_best: how many of the best tokens are told beside the
    chosen one, WHOLE_VOCABULARY or NO_SCORES. num_named: tokens that a row wants to be told of. processors: the
    user's own functions.
    """

    num_requests: int
    filters: bool = False
    penalties: bool = False
    num_edits: int = 0
    masked: bool = False
    num_best: int = NO_SCORES
    num_named: int = 0
    processors: tuple[ProcessorShape, ...] = ()

    @property
    def has_scores(self) -> bool:
        return self.num_best != NO_SCORES

    def __str__(self) -> str:
        features = [name for name in ("filters", "penalties", "masked") if getattr(self, name)]
        features += [f"{name}={getattr(self, name)}" for name in ("num_edits", "num_named") if getattr(self, name)]
        features += [f"num_best={self.num_best}"] if self.has_scores else []
        features += [f"{name}={num_rows}" for name, num_rows in self.processors]
        return f"sampler B={self.num_requests} {' '.join(features) or 'plain'}"


class SamplerInputs[A](NamedTuple):
    """Numbers of B requests, and E edits. W = V / 32 words of a mask. Rows that don't sample hold zeros.

    position: index of the token to be chosen. An edit adds `edit_value` to one logit, where the row's last token is
    `edit_if_last` (or that is ANY_TOKEN); unused ones name request B. mask: bit v % 32 of word v // 32 allows token v.
    """

    row: A  # [B]
    samples: A  # [B]
    position: A  # [B]
    seed: A  # [B, 2] uint32
    temperature: A  # [B] float32
    top_k: A  # [B]
    top_p: A  # [B] float32
    min_p: A  # [B] float32
    repetition: A  # [B] float32
    frequency: A  # [B] float32
    presence: A  # [B] float32
    edit_request: A  # [E]
    edit_token: A  # [E]
    edit_if_last: A  # [E]
    edit_value: A  # [E] float32
    mask: A  # [B, W] uint32
    named: A  # [B, num_named]


@lru_cache(maxsize=1024)
def field_shapes(shape: SamplerShape, vocab_size: int) -> SamplerInputs[FieldShape]:
    """Gives the shape of each field, in the order in which they are packed; what no row uses is empty."""
    B, E = shape.num_requests, shape.num_edits
    integer, number = FieldShape((B,)), FieldShape((B,), np.float32)

    def used(field: FieldShape, by: bool) -> FieldShape:
        return field if by else FieldShape((0,), field.dtype)

    return SamplerInputs(
        row=integer,
        samples=integer,
        position=integer,
        seed=FieldShape((B, 2), np.uint32),
        temperature=number,
        top_k=used(integer, shape.filters),
        top_p=used(number, shape.filters),
        min_p=used(number, shape.filters),
        repetition=used(number, shape.penalties),
        frequency=used(number, shape.penalties),
        presence=used(number, shape.penalties),
        edit_request=FieldShape((E,)),
        edit_token=FieldShape((E,)),
        edit_if_last=FieldShape((E,)),
        edit_value=FieldShape((E,), np.float32),
        mask=used(FieldShape((B, mask_words(vocab_size)), np.uint32), shape.masked),
        named=FieldShape((B, shape.num_named)),
    )


def mask_words(vocab_size: int) -> int:
    """The number of 32-bit words that hold one bit for each token."""
    return math.ceil(vocab_size / 32)


class ProcessorInputs[A](NamedTuple):
    """Which requests a traced logits processor works on ([R], unused ones name request B), and their parameters."""

    request: A
    parameters: dict[str, A]  # [R, ...] each


class SamplerLayout(NamedTuple):
    """How the packed inputs of one sampler are laid out."""

    shape: SamplerShape
    vocab_size: int
    processors: Mapping[str, LogitsProcessor]  # all that the engine has

    @property
    def packed_size(self) -> int:
        """The number of 32-bit words of packed inputs."""
        return packing.packed_size(self.all_fields())

    def host_views(self, packed: np.ndarray) -> tuple[SamplerInputs[np.ndarray], dict[str, ProcessorInputs]]:
        """Views of the packed array for the host to write."""
        return self._named(packing.host_views(packed, self.all_fields()))

    def unpack(self, packed: jax.Array) -> tuple[SamplerInputs[jax.Array], dict[str, ProcessorInputs]]:
        """The same fields inside the traced sampler."""
        return self._named(packing.unpack(packed, self.all_fields()))

    def all_fields(self) -> list[FieldShape]:
        """The shape of every field in packed order, those of the processors last."""
        fields = list(field_shapes(self.shape, self.vocab_size))
        for name, num_rows in self.shape.processors:
            fields.append(FieldShape((num_rows,)))
            for parameter, default in self.processors[name].parameters.items():
                words = as_words(parameter, default)
                fields.append(FieldShape((num_rows, *words.shape), words.dtype.type))
        return fields

    def _named(self, arrays: list) -> tuple[SamplerInputs, dict[str, ProcessorInputs]]:
        count = len(SamplerInputs._fields)
        rest = iter(arrays[count:])
        processors = {
            name: ProcessorInputs(next(rest), {parameter: next(rest) for parameter in self.processors[name].parameters})
            for name, _ in self.shape.processors
        }
        return SamplerInputs(*arrays[:count]), processors
