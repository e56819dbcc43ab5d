"""Text of single tokens, as log-probabilities show them. Knows one tokenizer; no request and no numbers."""

from collections.abc import Sequence

from jaxllm.text.tokenizer import Tokenizer

_ANCHORS = ("a", "x", "0", ".")  # a decoder may treat the first token of a text differently
_MOST_HELD = 12  # tokens that a character's bytes may be spread over, and then some


class TokenTexts:
    """What each token adds to a text.

    A token that leaves a character unfinished adds nothing, and the one that completes it adds all of it, so that the
    texts of a sequence's tokens join to the sequence's text. Special tokens have their names. What a token adds to
    finished text is looked up once.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._anchor = next((ids for each in _ANCHORS if (ids := self._tokens_of(each))), [])
        self._known: dict[int, tuple[str, bool]] = {}

    def text(self, token_id: int, held: Sequence[int] = ()) -> str:
        """Gives what the token adds behind `held`, the tokens of an unfinished character."""
        return self._read(token_id, held)[0]

    def hold(self, token_id: int, held: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Gives the tokens of the character that is unfinished behind this token, or none."""
        return (*held, token_id)[-_MOST_HELD:] if self._read(token_id, held)[1] else ()

    def _read(self, token_id: int, held: Sequence[int]) -> tuple[str, bool]:
        """Gives the token's text, and whether it leaves a character unfinished."""
        found = None if held else self._known.get(token_id)
        if found is None:
            stream = self._tokenizer.stream()
            stream.push([*self._anchor, *held])
            found = stream.push([token_id]), stream.flush() != ""
            if not held:
                self._known[token_id] = found
        return found

    def _tokens_of(self, text: str) -> list[int]:
        """Gives the tokens of a text that stands for itself."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        stream = self._tokenizer.stream()
        return ids if stream.push(ids) == text and not stream.flush() else []
