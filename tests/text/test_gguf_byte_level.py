from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.text.gguf_byte_level import build_byte_level
from jaxllm.text.gguf_vocabulary import read_vocabulary
from jaxllm.text.tokenizer import Tokenizer


def test_llama3_takes_a_whole_word_that_no_merge_makes() -> None:
    fields = {"tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": []}
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
