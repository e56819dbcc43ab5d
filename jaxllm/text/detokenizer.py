"""Turns the tokens of one request into text to send, and ends it at a stop string. Knows no stop token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.text.stop_strings import StopFinder
from jaxllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a request, maybe none, and the stop string if one was found in it."""

    text: str = ""
    stop: str | None = None


_NO_TEXT = TextDelta()


class Detokenizer:
    """Text of one request, token by token.

    Text that is sent is never taken back: an unfinished character waits for its other bytes, and what may become a stop
    string waits until that is decided. All deltas together are `tokenizer.decode` of the tokens, up to the stop string.
    Without a tokenizer, or with detokenize=False, it only counts.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self.num_tokens_used = 0
        self.stop: str | None = None
        self._stream = tokenizer.stream() if tokenizer and params.detokenize else None
        self._skipped = tokenizer.special_token_ids if tokenizer and params.skip_special_tokens else frozenset()
        self._include_stop = params.include_stop_str_in_output
        self._finder = StopFinder(params.stop or ()) if params.stop else None
        self._held = ""
        self._sent: list[str] = []
        self._finished = False

    @property
    def text(self) -> str:
        """All text given so far."""
        return "".join(self._sent)

    def push(self, token_ids: Sequence[int], finished: bool, drop_last: bool = False) -> TextDelta:
        """Takes a request's next tokens and gives the text that they settle; after a stop string there is none.

        `finished` tells that no tokens follow. `drop_last` tells that the last token is a stop token: its text is left
        out unless include_stop_str_in_output, but it counts as used.
        """
        if self.stop is not None or self._finished:
            return _NO_TEXT
        self._finished = finished
        if self._stream is None:
            self.num_tokens_used += len(token_ids)
            return _NO_TEXT
        num_with_text = len(token_ids) - (drop_last and not self._include_stop and len(token_ids) > 0)
        # Only a stop string needs to know which token completed it.
        group_size = 1 if self._finder else max(num_with_text, 1)
        settled: list[str] = []
        for start in range(0, num_with_text, group_size):
            group = token_ids[start : min(start + group_size, num_with_text)]
            self.num_tokens_used += len(group)
            kept = [token_id for token_id in group if token_id not in self._skipped]
            settled.append(self._settle(self._stream.push(kept)))
            if self.stop is not None:
                return self._send(settled)
        self.num_tokens_used += len(token_ids) - num_with_text
        if finished:
            settled.append(self._settle(self._stream.flush()))
            if self.stop is None:
                settled.append(self._held)
                self._held = ""
        return self._send(settled)

    def _settle(self, piece: str) -> str:
        """Gives the text that can no longer become a stop string, or all that precedes the one found."""
        if self._finder is None or not piece:
            return piece
        match = self._finder.feed(piece)
        pending = self._held + piece
        if match is None:
            end = len(pending) - self._finder.num_held
            self._held = pending[end:]
            return pending[:end]
        self.stop = match.text
        end = len(self._held) + match.end
        return pending[: end if self._include_stop else end - len(match.text)]

    def _send(self, settled: list[str]) -> TextDelta:
        text = "".join(settled)
        self._sent.append(text)
        return TextDelta(text, self.stop)
