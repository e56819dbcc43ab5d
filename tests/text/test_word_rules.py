import json
import time
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxllm.config.errors import InputError
from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.word_rules import find_word_rule

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_BYTES = BYTES | {"use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
NFC = {"type": "NFC"}


def split(pattern: str, **changes: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | changes


# normalizer and pre_tokenizers of each family's published tokenizer.json.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
FALCON = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    GPT2_BYTES,
    {"type": "Digits", "individual_digits": False},
    split("[0-9][0-9][0-9]"),
]
# llama.cpp's own, for files that name no rule.
UNNAMED = [
    split(r"[\p{P}\$\+<=>\^~\|]+"),
    split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
    split(r"\p{N}+"),
    split("[0-9][0-9][0-9]"),
    BYTES,
]
PUBLISHED: dict[str, tuple[dict | None, list[dict]]] = {
    "gpt-2": (None, [GPT2_BYTES]),
    "phi-2": (None, [GPT2_BYTES]),
    "olmo": (NFC, [GPT2_BYTES]),
    "smollm": (None, [DIGITS, GPT2_BYTES]),
    "starcoder": (None, [DIGITS, GPT2_BYTES]),
    "refact": (None, [DIGITS, GPT2_BYTES]),
    "command-r": (NFC, [DIGITS, GPT2_BYTES]),
    "falcon": (None, FALCON),
    "llama-bpe": (None, [split(CL100K), BYTES]),
    "llama3": (None, [split(CL100K), BYTES]),
    "llama-v3": (None, [split(CL100K), BYTES]),
    "dbrx": (None, [split(CL100K), BYTES]),
    "smaug-bpe": (None, [split(CL100K), BYTES]),
    "qwen2": (NFC, [split(QWEN2), BYTES]),
    "deepseek-r1-qwen": (NFC, [split(QWEN2), BYTES]),
    "deepseek-v3": (None, [split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), BYTES]),
    "tekken": (None, [split(TEKKEN), BYTES]),
    "gpt-4o": (None, [split(O200K, behavior="Removed", invert=True), BYTES]),
    "llama4": (None, [split(O200K), BYTES]),
    "default": (None, UNNAMED),
}


def published(name: str) -> Backend:
    """An empty tokenizer with the family's published pipeline."""
    normalizer, steps = PUBLISHED[name]
    whole = json.loads(Backend(models.BPE()).to_str())
    whole |= {"normalizer": normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    return Backend.from_str(json.dumps(whole))


def words(name: str, text: str) -> list[str]:
    """Cuts text by our rule, bytes spelled as characters."""
    rule = find_word_rule(name)
    text = unicodedata.normalize("NFC", text) if rule.nfc else text
    return [word for word, _ in rule.build().pre_tokenize_str(text)]


def published_words(backend: Backend, text: str) -> list[str]:
    text = backend.normalizer.normalize_str(text) if backend.normalizer else text
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_rule_cuts_hard_strings_as_the_family_published_it(name: str, hard_texts: list[str]) -> None:
    backend = published(name)
    for text in hard_texts:
        assert words(name, text) == published_words(backend, text), text


def test_every_known_name_is_compared_with_a_published_rule() -> None:
    with pytest.raises(InputError) as refusal:
        find_word_rule("klingon")
    message = str(refusal.value)
    assert message.startswith("the GGUF metadata tokenizer.ggml.pre is 'klingon', known are ")
    assert set(message.split("known are ")[1].split(": use")[0].split(", ")) == set(PUBLISHED)
    for wrong in (3, ["qwen2"], "q" * 10_000):
        with pytest.raises(InputError, match=r"tokenizer\.ggml\.pre is") as refusal:
            find_word_rule(wrong)
        assert len(str(refusal.value)) < 400


def test_a_file_that_names_no_rule_gets_the_default_one() -> None:
    assert find_word_rule(None) is find_word_rule("default")


TEXT = "It's DON'T x12345  fooBar\n\n a/b?\r\n!"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", "It|'s| DON|'|T| x|12345| | fooBar|\n\n| a|/|b|?|\r|\n|!"),
        ("smollm", "It|'s| DON|'|T| x|1|2|3|4|5| | fooBar|\n\n| a|/|b|?|\r|\n|!"),
        ("llama-bpe", "It|'s| DON|'T| x|123|45| | fooBar|\n\n| a|/b|?\r\n|!"),
        ("qwen2", "It|'s| DON|'T| x|1|2|3|4|5| | fooBar|\n\n| a|/b|?\r\n|!"),
        ("gpt-4o", "It's| DON'T| x|123|45| | foo|Bar|\n\n| a|/b|?\r\n|!"),
        ("tekken", "It|'s| DON|'T| x|1|2|3|4|5| | foo|Bar|\n\n| a|/b|?\r\n|!"),
        ("deepseek-v3", "It|'s| DON|'T| x|123|45| | fooBar|\n\n| a|/b|?\r\n|!"),
        ("falcon", "It|'|s| DON|'|T| x|123|45| | fooBar|\n\n| a|/|b|?|\r\n|!"),
        ("default", "It|'|s| DON|'|T| x|123|45| | fooBar|\n\n| a|/|b|?|\r\n|!"),
    ],
)
def test_each_family_cuts_words_its_own_way(name: str, expected: str) -> None:
    decoder = decoders.ByteLevel()
    assert [decoder.decode([word]) for word in words(name, TEXT)] == expected.split("|")


@pytest.mark.parametrize("name", ["gpt-2", "falcon", "llama-bpe", "deepseek-v3", "gpt-4o", "default"])
def test_no_rule_takes_long_over_a_long_text(name: str) -> None:
    cutter = find_word_rule(name).build()
    for unit in ("a", "A", " \t", "\n", "日", "1", "!", "\u0301", "x1"):
        text = unit * (100_000 // len(unit)) + "."
        start = time.process_time()
        cutter.pre_tokenize_str(text)
        assert time.process_time() - start < 2  # at most 0.2 s on an idle core


ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "    "]


def trained(name: str, corpus: list[str]) -> Backend:
    """A small tokenizer with the family's published pipeline, as its authors would have trained it."""
    whole = json.loads(published(name).to_str())
    backend = Backend.from_str(json.dumps(whole))
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=ADDED[:3], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(corpus * 3, trainer)
    backend.add_tokens(ADDED[3:])
    return backend


def converted(backend: Backend, name: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for this tokenizer."""
    whole = json.loads(backend.to_str())
    vocabulary = backend.get_vocab()
    added = {token["id"]: token for token in whole["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": sorted(vocabulary, key=vocabulary.__getitem__),
        "tokenizer.ggml.token_type": [
            1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(vocabulary))
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in whole["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "qwen2", "falcon", "deepseek-v3", "gpt-4o", "dbrx", "default"])
def test_a_converted_tokenizer_encodes_and_decodes_as_the_original(name: str, hard_texts: list[str]) -> None:
    original = trained(name, hard_texts)
    ours = tokenizer_from_gguf(converted(original, name))
    assert ours.vocab_size == original.get_vocab_size()
    for text in [*hard_texts, *(f"{text}<|im_end|>{text}<tool>    {text}" for text in hard_texts)]:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids) == original.decode(ids)


@pytest.fixture(scope="module")
def with_all_bytes(hard_texts: list[str]) -> Tokenizer:
    return tokenizer_from_gguf(converted(trained("llama-bpe", hard_texts), "llama-bpe"))


@given(text=st.text(max_size=40))
@settings(derandomize=True, max_examples=150, deadline=None)
def test_any_text_comes_back_where_all_bytes_are_tokens(with_all_bytes: Tokenizer, text: str) -> None:
    assert with_all_bytes.decode(with_all_bytes.encode(text), skip_special_tokens=False) == text


@given(text=st.text(max_size=40))
@settings(derandomize=True, max_examples=100, deadline=None)
@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "tekken", "deepseek-v3", "falcon", "default"])
def test_words_of_any_text_put_together_are_the_text(name: str, text: str) -> None:
    pieces = find_word_rule(name).build().pre_tokenize_str(text)
    alphabet = byte_of_char()
    assert bytes(alphabet[char] for piece, _ in pieces for char in piece) == text.encode()


def byte_of_char() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
