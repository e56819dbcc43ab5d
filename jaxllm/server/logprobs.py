"""Log-probabilities -> OpenAI's two JSON shapes, one for chats and one for completions. Knows no request."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxllm.api.logprobs import Logprob, PositionLogprobs, PromptLogprobs
from jaxllm.server.answers import Json
from jaxllm.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class LogprobStyle:
    """How a request wants its tokens told: the `num_top` best, -1 for all, besides those `named`."""

    num_top: int
    named: frozenset[int] = frozenset()
    as_token_ids: bool = False
    tokenizer: Tokenizer | None = None

    def token(self, token_id: int, entry: Logprob) -> str:
        """Names a token: by its text, or by its id where that was asked for or there is no text."""
        return f"token_id:{token_id}" if self.as_token_ids or entry.decoded_token is None else entry.decoded_token

    def best(self, position: PositionLogprobs) -> list[tuple[int, Logprob]]:
        """Gives the best tokens of a position in order, then the named ones that are not among them."""
        ranked = [(token_id, entry) for token_id, entry in position.items() if entry.rank is not None]
        ranked.sort(key=lambda item: item[1].rank or 0)
        if self.num_top >= 0:
            ranked = [item for item in ranked if (item[1].rank or 0) <= self.num_top]
        told = {token_id for token_id, _ in ranked}
        return ranked + [item for item in position.items() if item[0] in self.named and item[0] not in told]


def chat_logprobs(token_ids: Sequence[int], logprobs: Iterable[PositionLogprobs], style: LogprobStyle) -> Json:
    """Shapes the positions of some tokens as chats have them."""
    content = []
    for token_id, position in zip(token_ids, logprobs, strict=True):
        entry = _chat_entry(token_id, position[token_id], style)
        entry["top_logprobs"] = [_chat_entry(*best, style) for best in style.best(position)]
        content.append(entry)
    return {"content": content}


def _chat_entry(token_id: int, entry: Logprob, style: LogprobStyle) -> Json:
    token = style.token(token_id, entry)
    return {"token": token, "logprob": max(entry.logprob, _LOWEST), "bytes": list(token.encode(errors="replace"))}


class CompletionLogprobs:
    """Shapes the positions of a completion's tokens as they come; it remembers how long the text before them is."""

    def __init__(self, style: LogprobStyle):
        self._style = style
        self._offset = 0

    def shape(self, token_ids: Sequence[int], logprobs: Iterable[PositionLogprobs | None]) -> Json:
        """Shapes further tokens; the first of a prompt has no log-probability."""
        shaped: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, logprobs, strict=True):
            entry = position[token_id] if position else None
            text = self._style.token(token_id, entry or Logprob(0.0, None, self._text(token_id)))
            shaped["tokens"].append(text)
            shaped["token_logprobs"].append(None if entry is None else max(entry.logprob, _LOWEST))
            shaped["top_logprobs"].append(self._best(token_id, position) if position else None)
            shaped["text_offset"].append(self._offset)
            decoded = self._text(token_id) if entry is None else entry.decoded_token
            self._offset += len(decoded or "")
        return shaped

    def _best(self, own: int, position: PositionLogprobs) -> dict[str, float]:
        """Gives the best by their texts, and the position's own; of tokens with the same text the better one."""
        best: dict[str, float] = {}
        for token_id, entry in [*self._style.best(position), (own, position[own])]:
            best.setdefault(self._style.token(token_id, entry), max(entry.logprob, _LOWEST))
        return best

    def _text(self, token_id: int) -> str | None:
        tokenizer = self._style.tokenizer
        return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)


def joined(first: Json, second: Json) -> Json:
    """Puts the shapes of a prompt's tokens and of those behind it together."""
    return {name: first[name] + second[name] for name in first}


def prompt_logprobs_json(logprobs: PromptLogprobs) -> list[Json | None]:
    """Shapes a prompt's positions as vLLM does: by token id, with ranks."""
    return [
        {
            str(token_id): {
                "logprob": max(entry.logprob, _LOWEST),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        if position
        else None
        for position in logprobs
    ]
