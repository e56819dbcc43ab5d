"""Reads the tokenizer's part of GGUF metadata. Knows the keys and their types, builds nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from jaxllm.config.errors import InputError

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """What a token is for, by GGUF's numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The tokens of a GGUF file with what the file says of each; scores and merges are empty where it has none."""

    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    fields: Mapping[str, object]

    def token_of(self, name: str) -> str | None:
        """Gives the token whose id is the field `<name>_token_id`, or None."""
        token_id = self.token_id(name)
        return None if token_id is None else self.tokens[token_id]

    def token_id(self, name: str) -> int | None:
        """Gives the id in the field `<name>_token_id`, or None."""
        key = f"{_PREFIX}{name}_token_id"
        value = self.fields.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise InputError(f"the GGUF metadata {key} is {value!r}, but there are {len(self.tokens)} tokens")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Gives a field that is true or false."""
        value = self.fields.get(_PREFIX + name)
        if not isinstance(value, bool | None):
            raise InputError(f"the GGUF metadata {_PREFIX + name} must be true or false, got {value!r:.40}")
        return default if value is None else value

    def ids_of(self, kind: TokenType) -> list[int]:
        """Gives the ids of the tokens of one type."""
        return [token_id for token_id, found in enumerate(self.types) if found == kind]


def read_vocabulary(fields: Mapping[str, object]) -> GGUFVocabulary:
    """Takes the tokens out of GGUF metadata and checks that their lists fit together.

    Raises:
        InputError: a list is missing or mistyped, its length is another, or a token occurs twice.
    """
    tokens = _strings(fields, "tokens")
    if not tokens:
        raise InputError(
            f"the GGUF metadata has no {_PREFIX}tokens: convert the model again, or set skip_tokenizer_init"
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))
        raise InputError(f"the GGUF metadata lists the token {twice!r:.40} twice: convert the model again")
    types = _numbers(fields, "token_type", len(tokens)) or [TokenType.NORMAL] * len(tokens)
    if not all(isinstance(kind, int) for kind in types):
        raise InputError(f"the GGUF metadata {_PREFIX}token_type must be whole numbers: convert the model again")
    scores = _numbers(fields, "scores", len(tokens))
    return GGUFVocabulary(tokens, [int(kind) for kind in types], scores, _strings(fields, "merges"), fields)


def _strings(fields: Mapping[str, object], name: str) -> list[str]:
    values = fields.get(_PREFIX + name, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InputError(f"the GGUF metadata {_PREFIX + name} must be a list of strings, got {type(values).__name__}")
    return values


def _numbers(fields: Mapping[str, object], name: str, count: int) -> list[float]:
    values = fields.get(_PREFIX + name, [])
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise InputError(f"the GGUF metadata {_PREFIX + name} must be a list of numbers, got {type(values).__name__}")
    if values and len(values) != count:
        raise InputError(f"the GGUF metadata has {len(values)} {_PREFIX + name}, but {count} tokens")
    return values
