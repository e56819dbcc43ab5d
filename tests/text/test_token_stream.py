import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from jaxllm.text.token_stream import WindowStream, decoder_kind
from jaxllm.text.tokenizer import Tokenizer

modest = settings(derandomize=True, max_examples=150, deadline=None)

SPELLED = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = [
    "▁",
    "▁Paris",
    "▁▁",
    "ing",
    "##s",
    "é",
    "日",
    "\ufffd",
    "Ġ",
    "ĠParis",
    "<|plain text|>",
    "<0xZZ>",
    ".",
    "'",
    "s",
]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def gpt2_spelling() -> list[str]:
    """GPT-2's character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def words_and_bytes(decoder: Any) -> Tokenizer:
    """A tokenizer of 256 bytes in both spellings and some words, that decodes in the given way."""
    tokens = list(dict.fromkeys([*SPELLED, *WORDS, *gpt2_spelling()]))
    backend = Backend(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


def decoder_json(decoder: Any) -> dict[str, Any]:
    return json.loads(decoder.__getstate__())


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join(stream.push([token_id]) for token_id in ids) + stream.flush()


BYTE_LEVEL = words_and_bytes(decoders.ByteLevel())
SPM = words_and_bytes(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]))
SPM_PLAIN = words_and_bytes(decoders.Sequence(LLAMA))
WINDOWED = {
    "none": words_and_bytes(None),
    "metaspace": words_and_bytes(decoders.Metaspace()),
    "wordpiece": words_and_bytes(decoders.WordPiece()),
    "two steps": words_and_bytes(decoders.Sequence([decoders.Replace("é", "e"), decoders.Fuse()])),
}
BYTE_IDS = [i for char in gpt2_spelling() if (i := BYTE_LEVEL.token_to_id(char)) is not None]
BROKEN = st.sampled_from([0x80, 0xF1, 0xC0, 0xE4, 0xFF, 0x41]) | st.integers(0, 255)  # mostly no valid UTF-8
IDS = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 1), max_size=24)


@given(ids=IDS)
@modest
def test_a_byte_level_stream_equals_the_library_for_any_bytes(ids: list[int]) -> None:
    assert streamed(BYTE_LEVEL, ids) == BYTE_LEVEL.backend.decode(ids)


@given(raw=st.binary(max_size=12), text=st.text(max_size=4))
@modest
def test_a_byte_level_stream_replaces_what_is_no_utf8(raw: bytes, text: str) -> None:
    whole = text.encode() + raw + text.encode()
    ids = [BYTE_IDS[byte] for byte in whole]
    assert len(BYTE_IDS) == 256
    assert streamed(BYTE_LEVEL, ids) == BYTE_LEVEL.backend.decode(ids) == whole.decode(errors="replace")


@pytest.mark.parametrize("tokenizer", [SPM, SPM_PLAIN], ids=["stripped", "plain"])
@given(text=st.text(max_size=6), ids=st.lists(st.integers(256, 270), max_size=6), first=st.booleans())
@modest
def test_a_byte_fallback_stream_equals_the_library_for_valid_text(
    tokenizer: Tokenizer, text: str, ids: list[int], first: bool
) -> None:
    spelled = list(text.encode())
    tokens = [*spelled, *ids] if first else [*ids, *spelled, *ids]
    assert streamed(tokenizer, tokens) == tokenizer.backend.decode(tokens) == tokenizer.decode(tokens)


@pytest.mark.parametrize("tokenizer", [SPM, SPM_PLAIN], ids=["stripped", "plain"])
@given(raw=st.binary(max_size=12))
@modest
def test_each_offending_byte_token_becomes_one_replacement_and_valid_ones_survive(
    tokenizer: Tokenizer, raw: bytes
) -> None:
    expected, rest = "", raw
    while rest:  # the longest valid character, or one byte
        size = next((n for n in range(1, 5) if is_character(rest[:n])), None)
        expected += rest[:size].decode() if size else "\ufffd"
        rest = rest[size or 1 :]
    if tokenizer is SPM:
        expected = expected.removeprefix(" ")
    assert streamed(tokenizer, list(raw)) == tokenizer.decode(list(raw)) == expected


def is_character(raw: bytes) -> bool:
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("name", WINDOWED)
@given(ids=IDS)
@modest
def test_a_windowed_stream_equals_the_library(name: str, ids: list[int]) -> None:
    assert streamed(WINDOWED[name], ids) == WINDOWED[name].backend.decode(ids)


@given(ids=IDS, extra=st.lists(BROKEN, min_size=40, max_size=40))
@modest
def test_the_window_gives_what_the_bytes_give(ids: list[int], extra: list[int]) -> None:
    ids = [*ids, *(BYTE_IDS[byte] for byte in extra)]
    backend = BYTE_LEVEL.backend
    window = WindowStream(backend.decode, backend.id_to_token)
    assert "".join(window.push([token_id]) for token_id in ids) + window.flush() == backend.decode(ids)


def test_the_window_stays_short_and_holds_at_most_three_characters() -> None:
    backend = BYTE_LEVEL.backend
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return backend.decode(ids)

    stream = WindowStream(decode, backend.id_to_token)
    given_text = "".join(stream.push([BYTE_IDS[0xFF]]) for _ in range(1000))
    assert len(given_text) >= 997
    assert len(given_text + stream.flush()) == 1000
    assert max(seen) <= 25


def test_the_window_stays_short_over_tokens_that_have_no_text_alone() -> None:
    backend = WINDOWED["metaspace"].backend
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return backend.decode(ids)

    space = backend.token_to_id("▁")
    assert space is not None
    assert backend.decode([space]) == ""
    stream = WindowStream(decode, backend.id_to_token)
    assert "".join(stream.push([space]) for _ in range(100)) == " " * 99
    assert max(seen) <= 25


@given(text=st.text(max_size=12), raw=st.binary(max_size=4), sizes=st.lists(st.integers(0, 4), min_size=12))
@modest
def test_text_streamed_in_any_pieces_is_that_of_the_whole(
    real: Tokenizer, text: str, raw: bytes, sizes: list[int]
) -> None:
    lone = [i for byte in raw if (i := real.token_to_id(byte_token(real, byte))) is not None]
    ids = [*real.encode(text), *lone, *real.encode(text, add_special_tokens=False)]
    stream, parts, start = real.stream(), [], 0
    for size in [*sizes, len(ids)]:
        parts.append(stream.push(ids[start : start + size]))
        start += size
    assert "".join(parts) + stream.flush() == real.decode(ids, skip_special_tokens=False)


def byte_token(tokenizer: Tokenizer, byte: int) -> str:
    return gpt2_spelling()[byte] if tokenizer.token_to_id(SPELLED[0]) is None else SPELLED[byte]


def test_decoders_are_told_apart() -> None:
    assert decoder_kind(None) == (None, 0)
    assert decoder_kind(decoder_json(decoders.ByteLevel())) == ("ByteLevel", 0)
    assert decoder_kind(decoder_json(decoders.Sequence(LLAMA))) == ("ByteFallback", 0)
    assert decoder_kind(decoder_json(decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 0)]))) == ("ByteFallback", 1)
    assert decoder_kind(decoder_json(decoders.Sequence([*LLAMA, decoders.Strip(" ", 0, 1)]))) == (None, 0)
    assert decoder_kind(decoder_json(decoders.Sequence([*LLAMA, decoders.Metaspace()]))) == (None, 0)
    assert decoder_kind(decoder_json(decoders.Sequence([decoders.Replace("_", " "), *LLAMA[1:]]))) == (None, 0)
    assert decoder_kind(decoder_json(decoders.Metaspace())) == (None, 0)
