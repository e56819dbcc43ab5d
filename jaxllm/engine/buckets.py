"""Every compiled shape, from one short list: the warm-up plan and the only place that pads. Knows sizes only."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal, NamedTuple

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BETWEEN = (48, 96, 192, 384, 768)  # where a step costs what its rows cost, half of them padding is too much
# From some 150 rows on products cost what their rows cost; steps with prompts are filled, those without are padded.
BETWEEN_DECODE = (160, 224, 320, 448)
MIXED_REQUESTS = (16, 64, 256)  # more of them leave no room for small steps; a request alone is padded to 16 as fast
# On a GPU steps of two to seven rows cost what eight do: cuBLASLt pads them. One row has kernels of its own.
PADDED_DECODE = (2, 4)
LEAST_TO_FILL = 256  # tokens below which a step costs what reading the weights costs
# The table's width costs a copy of B x M integers a step and nothing else: only long ones are worth a choice.
TABLE_WIDTHS = (1024, 4096, 16384, 65536)

Variant = Literal["greedy", "logits", "hidden"]
# Scored prompts are rare and their chunks few: the third variant compiles at first use.
VARIANTS: tuple[Variant, ...] = ("greedy", "logits")


class StepShape(NamedTuple):
    """What a compiled step is keyed by: T flat tokens, B requests, table width M, and what it gives.

    With T == B every request has one token: the decode program. Otherwise the batch is ragged: the mixed program.
    The variant "greedy" chooses the best token itself; "logits" leaves the choice to a sampler program of its own, so
    that what a sampler can do does not multiply the compiled forward passes; "hidden" gives the last hidden states of
    all tokens too, from which a prompt's log-probabilities are computed.
    """

    num_tokens: int
    num_requests: int
    table_width: int
    variant: Variant

    @property
    def program(self) -> str:
        return "decode" if self.num_tokens == self.num_requests else "mixed"

    @property
    def label(self) -> str:
        """The shape as a name, of its compiled program."""
        return str(self).replace(" ", "_").replace("=", "")

    def holds(self, other: "StepShape") -> bool:
        """Says whether a step of the other shape, padded, can run in this one; logits serve a greedy step too."""
        gives_enough = self.variant == other.variant or (self.variant, other.variant) == ("logits", "greedy")
        return (
            self.program == other.program
            and gives_enough
            and self.num_tokens >= other.num_tokens
            and self.num_requests >= other.num_requests
            and self.table_width >= other.table_width
        )

    def __str__(self) -> str:
        return f"{self.program} T={self.num_tokens} B={self.num_requests} M={self.table_width} {self.variant}"


@dataclass(frozen=True, slots=True)
class Buckets:
    """The sizes that steps are padded to, each ascending and ending with the engine's own limit."""

    decode: tuple[int, ...]
    mixed_tokens: tuple[int, ...]
    mixed_requests: tuple[int, ...]
    table_widths: tuple[int, ...]
    fillable: tuple[int, ...] = ()  # those numbers of tokens for which a scheduler should put a few tokens off

    def shape(
        self, num_tokens: int, num_requests: int, table_width: int, variant: Variant, is_mixed: bool | None = None
    ) -> StepShape:
        """Gives the smallest compiled shape that holds the step.

        Of several data ranks the numbers are each the largest of any, so that they do not tell by themselves whether
        some request has more than one token: `is_mixed` does.
        """
        if not (num_tokens != num_requests if is_mixed is None else is_mixed):
            size = self.decode_size(num_requests)
            return StepShape(size, size, _fit(self.table_widths, table_width), variant)
        return self._mixed(num_tokens, num_requests, table_width, variant)

    def _mixed(self, num_tokens: int, num_requests: int, table_width: int, variant: Variant) -> StepShape:
        requests = _fit(self.mixed_requests, num_requests)
        tokens = _fit(self.mixed_sizes(num_requests), num_tokens)
        return StepShape(tokens, requests, _fit(self.table_widths, table_width), variant)

    def decode_size(self, num_requests: int) -> int:
        """Gives what a step of one token per request is padded to."""
        return _fit(self.decode, num_requests)

    def mixed_sizes(self, num_requests: int) -> tuple[int, ...]:
        """Lists what the tokens of a mixed step of so many requests may be padded to."""
        requests = _fit(self.mixed_requests, num_requests)  # T == B would mean decode
        return tuple(size for size in self.mixed_tokens if size > requests) or (2 * requests,)

    def plan(self, variants: tuple[Variant, ...] = VARIANTS) -> list[StepShape]:
        """Lists every shape that a step can have, small ones first."""
        shapes = {
            make(tokens, requests, width, variant)
            for variant in variants
            for width in self.table_widths
            for make, tokens, requests in (
                *((self.shape, size, size) for size in self.decode),
                *((self._mixed, t, b) for t in self.mixed_tokens for b in self.mixed_requests if b <= t),
            )
        }
        return sorted(shapes, key=lambda s: (s.num_tokens, s.num_requests, s.table_width, VARIANTS.index(s.variant)))

    def num_requests(self) -> list[int]:
        """Lists every size that the batch of a step is padded to."""
        return sorted({*self.decode, *self.mixed_requests})

    def covering(self) -> list[StepShape]:
        """Lists the fewest shapes that together hold every step, the one first that takes longest to compile."""
        width, requests = self.table_widths[-1], self.decode[-1]
        largest = self._mixed(self.mixed_tokens[-1], self.mixed_requests[-1], width, "logits")
        return [largest, self.shape(requests, requests, width, "logits")]


def make_buckets(max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int, coarse: bool) -> Buckets:
    """Cuts the list down to the engine's limits; coarse (a CPU) keeps few shapes, since each costs a compilation."""
    max_requests = min(max_num_seqs, max_num_batched_tokens)
    fine = tuple(sorted((*SIZES, *BETWEEN)))
    large = tuple(size for size in fine if size >= LEAST_TO_FILL)
    mixed_tokens = _upto(max_num_batched_tokens, SIZES[5::2] if coarse else (32, 128, *large))
    return Buckets(
        decode=_upto(max_requests, SIZES if coarse else tuple(sorted({*fine, *BETWEEN_DECODE} - {*PADDED_DECODE}))),
        mixed_tokens=mixed_tokens,
        mixed_requests=_upto(max_requests, SIZES[::4] if coarse else MIXED_REQUESTS),
        table_widths=_upto(max_blocks, TABLE_WIDTHS),
        # With T == B a step would be a decode step, so sizes up to that of the requests cannot always be had.
        fillable=() if coarse else tuple(size for size in mixed_tokens if size > max(max_requests, LEAST_TO_FILL - 1)),
    )


def _upto(limit: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (*(size for size in sizes if size < limit), limit)


def _fit(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
