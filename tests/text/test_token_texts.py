from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.text.token_texts import TokenTexts
from jaxllm.text.tokenizer import Tokenizer

modest = settings(derandomize=True, max_examples=40, deadline=None)
PIECES = st.sampled_from(
    ["👨‍👩‍👧‍👦", "🫨", "e\u0301", "日本語", "የኢ", "𓀀", " ", "\n\n", "a", "Hello", " world", "3.14"]
)
TEXTS = st.lists(PIECES | st.text(max_size=3), max_size=10).map("".join)


def texts_of(texts: TokenTexts, ids: list[int]) -> list[str]:
    held: tuple[int, ...] = ()
    found = []
    for token_id in ids:
        found.append(texts.text(token_id, held))
        held = texts.hold(token_id, held)
    return found


@given(text=TEXTS)
@modest
def test_the_texts_of_a_sequences_tokens_join_to_its_text(real: Tokenizer, text: str) -> None:
    ids = real.encode(text, add_special_tokens=False)
    joined = "".join(texts_of(TokenTexts(real), ids))
    assert joined == real.decode(ids, skip_special_tokens=False).rstrip("\ufffd") or joined == real.decode(ids)


def test_an_unfinished_character_is_empty_and_the_token_that_completes_it_has_it_all(real: Tokenizer) -> None:
    ids = real.encode("𓀀", add_special_tokens=False)
    assert texts_of(TokenTexts(real), [*ids, *ids]) == ([""] * (len(ids) - 1) + ["𓀀"]) * 2


def test_another_token_behind_an_unfinished_character_shows_its_replacement(real: Tokenizer) -> None:
    first = real.encode("𓀀", add_special_tokens=False)[0]
    texts = TokenTexts(real)
    word = real.encode("x", add_special_tokens=False)[-1]
    assert texts.text(word, texts.hold(first)).strip("\ufffd") == "x"
    assert texts.text(word) == "x"


def test_a_word_keeps_its_space_and_a_special_token_its_name(smollm2: Tokenizer) -> None:
    texts = TokenTexts(smollm2)
    (paris,) = smollm2.encode(" Paris")
    assert texts.text(paris) == " Paris"
    assert texts.text(smollm2.eos_token_ids[0]) == "<|im_end|>"
    assert texts.hold(smollm2.eos_token_ids[0]) == ()


def test_an_id_outside_the_vocabulary_has_no_text(real: Tokenizer) -> None:
    assert TokenTexts(real).text(real.vocab_size + 5) == ""
