"""Decodes tokens as they come, in constant time each, with what is emitted never taken back.

Knows how a `tokenizers` decoder joins tokens; knows nothing of requests, stop strings or special tokens.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

_REPLACEMENT = "\ufffd"


class TokenStream(Protocol):
    """Text of a growing list of tokens."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and gives the text that they settle."""
        ...

    def flush(self) -> str:
        """Gives what is still held back, once no token follows."""
        ...


class ByteStream:
    """Decoder whose tokens are bytes: UTF-8 itself says when a character is complete."""

    def __init__(self, token_bytes: Callable[[int], bytes], errors: str, strip_left: int) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._strip_left = strip_left

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and gives the text that they settle."""
        return self._stripped(self._decoder.decode(b"".join(map(self._token_bytes, token_ids))))

    def flush(self) -> str:
        """Gives what is still held back, once no token follows."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        """Drops the dummy space in front of the whole text."""
        while text and self._strip_left:
            if text[0] != " ":
                self._strip_left = 0
                break
            text, self._strip_left = text[1:], self._strip_left - 1
        return text


class WindowStream:
    """Any other decoder: decodes the last few tokens again with each new one.

    Trailing replacement characters wait, since an unfinished character has up to 3 bytes and may show as one for each.
    The window starts well before those bytes, and never at a token that has no text of its own: a decoder may treat the
    first token of a text differently.
    """

    _MAX_HELD = 3
    _KEPT = 3 * _MAX_HELD + 3  # each held character may hide 3 bytes, and 3 more find the next character's start
    _LONGEST = 2 * _KEPT

    def __init__(self, decode: Callable[[list[int]], str], id_to_token: Callable[[int], str | None]) -> None:
        self._decode = decode
        self._id_to_token = id_to_token
        self._window: list[int] = []
        self._emitted = 0  # characters of the window's text

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next tokens and gives the text that they settle."""
        return "".join(map(self._push_one, token_ids))

    def flush(self) -> str:
        """Gives what is still held back, once no token follows."""
        text = self._decode(self._window)
        rest, self._emitted = text[self._emitted :], max(self._emitted, len(text))
        return rest

    def _push_one(self, token_id: int) -> str:
        if self._id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), self._MAX_HELD)
        settled = len(text) - held
        new, self._emitted = text[self._emitted : settled], max(self._emitted, settled)
        self._shorten(held)
        return new

    def _shorten(self, held: int) -> None:
        if held and len(self._window) <= self._LONGEST:
            return
        for size in (self._KEPT,) if held else (1, self._KEPT):
            window = self._window[-size:]
            text = self._decode(window)
            if text:
                self._window, self._emitted = window, len(text) - held
                return


def make_stream(
    decoder: Mapping[str, object] | None, id_to_token: Callable[[int], str | None], decode: Callable[[list[int]], str]
) -> Callable[[], TokenStream]:
    """Gives a constructor of streams for the decoder that this JSON describes."""
    kind, strip_left = decoder_kind(decoder)
    if kind is None:
        return lambda: WindowStream(decode, id_to_token)
    to_bytes, errors = (_byte_level, "replace") if kind == "ByteLevel" else (_byte_fallback, _EACH_BYTE)
    table = _ByteTable(id_to_token, to_bytes)
    return lambda: ByteStream(table.__getitem__, errors, strip_left)


def decoder_kind(decoder: Mapping[str, object] | None) -> tuple[str | None, int]:
    """Tells whether tokens are bytes ("ByteLevel", "ByteFallback"), and how many leading spaces are dropped."""
    if decoder is None:
        return None, 0
    if decoder["type"] == "ByteLevel":
        return "ByteLevel", 0
    steps = decoder.get("decoders")
    if not isinstance(steps, list) or [step["type"] for step in steps[:3]] != ["Replace", "ByteFallback", "Fuse"]:
        return None, 0
    if steps[0]["pattern"] != {"String": _SPACE_MARK} or steps[0]["content"] != " ":
        return None, 0
    strip = steps[3:] or [{"type": "Strip", "content": " ", "start": 0, "stop": 0}]
    if len(strip) > 1 or (strip[0]["type"], strip[0].get("content"), strip[0].get("stop")) != ("Strip", " ", 0):
        return None, 0
    return "ByteFallback", strip[0]["start"]


class _ByteTable(dict[int, bytes]):
    """Bytes of each token, looked up once. A token outside the vocabulary has none."""

    def __init__(self, id_to_token: Callable[[int], str | None], to_bytes: Callable[[str], bytes]) -> None:
        super().__init__()
        self._id_to_token = id_to_token
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        self[token_id] = found = b"" if token is None else self._to_bytes(token)
        return found


def _byte_level(token: str) -> bytes:
    """Undoes GPT-2's spelling of bytes as printable characters; an added token may be plain text instead."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace(_SPACE_MARK, " ").encode()


def _chars_of_bytes() -> dict[str, int]:
    """Maps GPT-2's characters to bytes: printable Latin-1 stands for itself, the rest follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Writes one replacement character for each byte, as SentencePiece does; Python's own rule joins some."""
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


_SPACE_MARK = "▁"
_BYTE_OF_CHAR = _chars_of_bytes()
_EACH_BYTE = "jaxllm.replace_each_byte"
codecs.register_error(_EACH_BYTE, _replace_each_byte)
