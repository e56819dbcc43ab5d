import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors, trainers
from tokenizers import Tokenizer as Backend

from jaxllm.text.gguf_sentencepiece import merges_of_scores
from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf
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


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def original(hard_texts: list[str]) -> Backend:
    """A small tokenizer built as Llama 2's tokenizer.json is, with a vocabulary of its own."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    mark = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*special, *BYTES], limit_alphabet=150)
    backend.train_from_iterator([text for text in hard_texts if "<" not in text], trainer)
    whole = json.loads(backend.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] in special]
    whole["model"]["byte_fallback"] = True
    backend = Backend.from_str(json.dumps(whole))
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def test_a_converted_tokenizer_encodes_and_decodes_as_the_original(original: Backend, hard_texts: list[str]) -> None:
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<tool>": 4} | dict.fromkeys(BYTES, 6)
    ours = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [float(-i) for i in range(len(tokens))],
            "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    for text in [*hard_texts, *(f"{text}</s>{text}<tool>" for text in hard_texts)]:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == original.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


def test_a_long_text_without_any_space_takes_no_time(gemma: Tokenizer) -> None:
    for unit in ("a", "日", "x1", "\U00013000", " ", "haha"):
        start = time.process_time()
        gemma.encode(unit * (100_000 // len(unit)))
        assert time.process_time() - start < 2  # at most 0.1 s on an idle core
