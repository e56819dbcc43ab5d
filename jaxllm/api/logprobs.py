"""Log-probabilities of tokens, shaped as vLLM's. Knows scores and token texts; no request."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from jaxllm.engine.scores import TokenScores
from jaxllm.text.token_texts import TokenTexts


@dataclass(slots=True)
class Logprob:
    """What one token scored at one position. rank 1 is the best of the vocabulary; None where it is not known.

    decoded_token is what the token adds to the text, None without a tokenizer. It is empty for one that leaves a
    character unfinished; the token that completes the character has all of it.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


type PositionLogprobs = dict[int, Logprob]


class FlatLogprobs(Sequence[PositionLogprobs]):
    """Log-probabilities of many positions in a few flat lists, which the garbage collector need not walk.

    It reads as a list of dictionaries, made as they are asked for. Position i has the entries from start_indices[i] to
    end_indices[i] of token_ids, logprobs, ranks and decoded_tokens. One without any reads as an empty dictionary.
    """

    __slots__ = ("decoded_tokens", "end_indices", "logprobs", "ranks", "start_indices", "token_ids")

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, position: PositionLogprobs | None) -> None:
        """Adds a position behind the others."""
        entries = position or {}
        self.append_entries(
            list(entries),
            [entry.logprob for entry in entries.values()],
            [entry.rank for entry in entries.values()],
            [entry.decoded_token for entry in entries.values()],
        )

    def append_entries(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int | None],
        decoded_tokens: Sequence[str | None],
    ) -> None:
        """Adds a position from its columns, without an object for each entry."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += decoded_tokens
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[PositionLogprobs | None]) -> None:
        """Adds several positions."""
        if isinstance(positions, FlatLogprobs):
            for start, end in zip(positions.start_indices, positions.end_indices, strict=True):
                self.append_entries(
                    positions.token_ids[start:end],
                    positions.logprobs[start:end],
                    positions.ranks[start:end],
                    positions.decoded_tokens[start:end],
                )
        else:
            for position in positions:
                self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "PositionLogprobs | FlatLogprobs":
        if isinstance(index, slice):
            part = FlatLogprobs()
            for start, end in zip(self.start_indices[index], self.end_indices[index], strict=True):
                part.append_entries(
                    self.token_ids[start:end],
                    self.logprobs[start:end],
                    self.ranks[start:end],
                    self.decoded_tokens[start:end],
                )
            return part
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatLogprobs):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in FlatLogprobs.__slots__)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


type SampleLogprobs = list[PositionLogprobs] | FlatLogprobs
type PromptLogprobs = list[PositionLogprobs | None] | FlatLogprobs


class LogprobWriter:
    """Turns the scores of one sequence's tokens into log-probabilities, in order: what a token adds to the text depends
    on those before it.
    """

    def __init__(self, texts: TokenTexts | None, flat: bool):
        self._texts = texts
        self._flat = flat
        self._held: tuple[int, ...] = ()

    def container(self) -> SampleLogprobs:
        """Makes an empty container of the kind that the request asked for."""
        return FlatLogprobs() if self._flat else []

    def prompt_container(self) -> PromptLogprobs:
        return FlatLogprobs() if self._flat else []

    def write(self, scores: Iterable[TokenScores | None], into: SampleLogprobs | PromptLogprobs) -> None:
        """Adds the positions of these scores."""
        for position in scores:
            if position is None:
                into.append(None)  # pyright: ignore[reportArgumentType]
                continue
            token_ids, values, ranks = _without_repeats(position)
            decoded = self._decode(token_ids)
            if isinstance(into, FlatLogprobs):
                into.append_entries(token_ids, values, ranks, decoded)
            else:
                into.append(dict(zip(token_ids, map(Logprob, values, ranks, decoded), strict=True)))

    def _decode(self, token_ids: Sequence[int]) -> list[str | None]:
        """Gives the texts of a position's tokens, the first of which is the one that stands there."""
        if self._texts is None:
            return [None] * len(token_ids)
        texts, held = self._texts, self._held
        decoded: list[str | None] = [texts.text(token_id, held) for token_id in token_ids]
        self._held = texts.hold(token_ids[0], held)
        return decoded


def _without_repeats(position: TokenScores) -> tuple[list[int], list[float], list[int | None]]:
    """Leaves out tokens that were named before: the position's own may be among the best, a named one in either."""
    entries = {}
    for token_id, value, rank in zip(*position, strict=True):
        if token_id not in entries:
            entries[token_id] = (value, rank or None)
    values, ranks = zip(*entries.values(), strict=True)
    return list(entries), list(values), list(ranks)
