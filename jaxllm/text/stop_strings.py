"""Finds the first stop string in text that comes in pieces. Knows no tokens."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that ended `end` characters into the piece."""

    text: str
    end: int


class StopFinder:
    """Looks for the stop string that is complete first, the longest of several that end together.

    `num_held` is the length of the text's tail that may still become one. The cost is linear in the text, however long
    the stop strings are (Knuth-Morris-Pratt).
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]

    @property
    def num_held(self) -> int:
        """Number of last characters that a stop string may start with."""
        return max((pattern.matched for pattern in self._patterns), default=0)

    def feed(self, piece: str) -> StopMatch | None:
        """Takes the next piece of text; gives the stop string it completes. Not to be called again after that."""
        first: StopMatch | None = None
        for pattern in self._patterns:
            end = pattern.feed(piece)
            if end is not None and (first is None or end < first.end):
                first = StopMatch(pattern.text, end)
        return first


class _Pattern:
    """One stop string and how much of it the text ends with."""

    __slots__ = ("_shorter", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._shorter = _borders(text)

    def feed(self, piece: str) -> int | None:
        """Gives where in the piece the stop string ends, or None."""
        if not self.matched and self.text[0] not in piece:
            return None
        for position, char in enumerate(piece):
            while self.matched and self.text[self.matched] != char:
                self.matched = self._shorter[self.matched]
            self.matched += self.text[self.matched] == char
            if self.matched == len(self.text):
                return position + 1
        return None


def _borders(text: str) -> list[int]:
    """Gives, for each length, the length of the longest proper prefix of that prefix which also ends it."""
    borders = [0, 0]
    length = 0
    for char in text[1:]:
        while length and text[length] != char:
            length = borders[length]
        length += text[length] == char
        borders.append(length)
    return borders
