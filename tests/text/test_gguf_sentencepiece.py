from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.text.gguf_sentencepiece import merges_of_scores
from jaxllm.text.gguf_vocabulary import read_vocabulary
from jaxllm.text.tokenizer import Tokenizer

modest = settings(derandomize=True, max_examples=100, deadline=None)

WORDS = st.sampled_from(
    [
        "the",
        " the",
        "ing",
        "tion",
        " ",
        "Hello",
        "world",
        "haha",
        "aaaa",
        "123",
        "é",
        "日本",
        "한국",
        "🫨",
        "𓀀",
        ".",
        "'s",
        "ß",
        "ABC",
    ]
)
TEXTS = st.lists(WORDS | st.text(max_size=3), max_size=10).map("".join)


def sentencepiece(text: str, fields: dict[str, Any], ids: dict[str, int]) -> list[int]:
    """SentencePiece's rule written plainly: join the best neighbours, the leftmost first; the rest becomes bytes."""
    scores, types = fields["tokenizer.ggml.scores"], fields["tokenizer.ggml.token_type"]
    pieces = list(text.replace(" ", "▁"))
    while True:
        joined = [(ids.get(left + right), at) for at, (left, right) in enumerate(pairwise(pieces))]
        candidates = [(scores[i], -at) for i, at in joined if i is not None and types[i] == 1]
        if not candidates:
            break
        at = -max(candidates)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        i for piece in pieces for i in ([ids[piece]] if piece in ids else [ids[f"<0x{b:02X}>"] for b in piece.encode()])
    ]


@given(text=TEXTS)
@modest
def test_gemma_joins_pieces_as_sentencepiece_does(
    gemma: Tokenizer, gemma_fields: dict[str, Any], gemma_ids: dict[str, int], text: str
) -> None:
    added = [token.content for token in gemma.backend.get_added_tokens_decoder().values() if len(token.content) < 3]
    for token in sorted(added, key=len, reverse=True):  # runs of spaces and line breaks are tokens before any joining
        text = text.replace(token, "")
    assert gemma.encode(text, add_special_tokens=False) == sentencepiece(text, gemma_fields, gemma_ids)


@given(text=st.text(max_size=30) | TEXTS)
@modest
def test_gemma_gives_any_text_back(gemma: Tokenizer, text: str) -> None:
    text = text.replace("▁", "_")  # the mark of a space
    assert gemma.decode(gemma.encode(text), skip_special_tokens=True) == text


def test_merges_are_every_cut_of_a_normal_token_the_best_score_first() -> None:
    fields = {
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "bc", "abc", "<a>", "<0x61>", "xy"],
        "tokenizer.ggml.scores": [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0, 0.0, 0.0],
        "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 1, 3, 6, 1],
    }
    vocabulary = read_vocabulary(fields)
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    assert merges_of_scores(vocabulary, ids) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]
