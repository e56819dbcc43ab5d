import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.text.gguf_byte_level import build_byte_level
from jaxllm.text.gguf_vocabulary import read_vocabulary
from jaxllm.text.tokenizer import Tokenizer


def words(pre: str, text: str) -> list[str]:
    """Cuts text as a family does, before any merge."""
    backend = build_byte_level(read_vocabulary({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": pre}))
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    pieces = backend.pre_tokenizer.pre_tokenize_str(text)
    return [backend.decoder.decode([piece]) for piece, _ in pieces]


TEXT = "It's DON'T x12345  fooBar\n\n a/b?\r\n!"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "It|'s| DON|'|T| x|12345| | fooBar|\n\n| a|/|b|?|\r|\n|!"),
        ("smollm", "It|'s| DON|'|T| x|1|2|3|4|5| | fooBar|\n\n| a|/|b|?|\r|\n|!"),
        ("llama-bpe", "It|'s| DON|'T| x|123|45| | fooBar|\n\n| a|/b|?\r\n|!"),
        ("qwen2", "It|'s| DON|'T| x|1|2|3|4|5| | fooBar|\n\n| a|/b|?\r\n|!"),
        ("gpt-4o", "It's| DON'T| x|123|45| | foo|Bar|\n\n| a|/b|?\r\n|!"),
        ("tekken", "It|'s| DON|'T| x|1|2|3|4|5| | foo|Bar|\n\n| a|/b|?\r\n|!"),
    ],
)
def test_each_family_cuts_words_its_own_way(pre: str, expected: str) -> None:
    assert words(pre, TEXT) == expected.split("|")


@pytest.mark.parametrize(
    ("name", "same_as"),
    [("default", "gpt-2"), ("phi-2", "gpt-2"), ("starcoder", "smollm"), ("llama3", "llama-bpe"), ("dbrx", "llama-bpe")],
)
def test_other_names_of_a_rule_cut_the_same(name: str, same_as: str) -> None:
    assert words(name, TEXT) == words(same_as, TEXT)


def test_only_qwen2_composes_accents() -> None:
    assert words("qwen2", "e\u0301") == ["é"]
    assert words("llama-bpe", "e\u0301") != ["é"]


def test_llama3_takes_a_whole_word_that_no_merge_makes() -> None:
    fields = {"tokenizer.ggml.tokens": ["a", "b", "ab"]}
    for pre, ids in (("llama-bpe", [2]), ("dbrx", [0, 1])):
        backend = build_byte_level(read_vocabulary(fields | {"tokenizer.ggml.pre": pre}))
        assert backend.encode("ab").ids == ids


@given(text=st.text(max_size=30))
@settings(derandomize=True, max_examples=150, deadline=None)
def test_smollm2_gives_any_text_back_whose_bytes_are_tokens(smollm2: Tokenizer, text: str) -> None:
    absent = {0xF1, 0xF2}  # lead bytes of the unassigned planes 4 to 11
    known = "".join(char for char in text if all(byte_is_known(smollm2, byte) for byte in char.encode()))
    assert smollm2.decode(smollm2.encode(known), skip_special_tokens=False) == known
    assert not any(byte_is_known(smollm2, byte) for byte in absent)


def byte_is_known(tokenizer: Tokenizer, byte: int) -> bool:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    char = chr(byte) if byte in printable else chr(0x100 + others.index(byte))
    return tokenizer.token_to_id(char) is not None
