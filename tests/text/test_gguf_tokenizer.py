import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config.errors import InputError
from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf
from jaxllm.text.tokenizer import Tokenizer

Golden = Callable[[str], list[dict[str, Any]]]

LLAMA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "<tool>", "▁▁", "<turn>"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -1000.0, -1000.0, -1000.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 4, 4, 3],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
GPT2 = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["<|endoftext|>", "a", "b", "ab", "Ġ", "1", "2", "12", "<tool>"],
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["a b", "1 2"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
}


def built(base: dict[str, Any], **changes: Any) -> Tokenizer:
    """Builds from metadata with some fields changed, or left out where None."""
    fields = base | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return tokenizer_from_gguf({key: value for key, value in fields.items() if value is not None})


def test_smollm2_encodes_decodes_and_chats_as_the_reference(smollm2: Tokenizer, golden: Golden) -> None:
    results = golden("smollm2")
    assert len(results) == 5
    for result in results:
        messages = [{"role": "user", "content": result["prompt"]}]
        assert smollm2.render_chat(messages) == result["prompt_text"]
        assert smollm2.apply_chat_template(messages) == result["prompt_ids"]
        assert smollm2.encode(result["prompt_text"]) == result["prompt_ids"]
        assert smollm2.decode(result["output_ids"][: result["first_eos"]]) == result["output_text"]


def test_gemma_encodes_with_one_bos_and_decodes_as_the_reference(gemma: Tokenizer, golden: Golden) -> None:
    results = golden("gemma3")
    assert len(results) == 5
    for result in results:
        text = result["prompt_text"]
        assert gemma.encode(text.removeprefix("<bos>")) == result["prompt_ids"]
        assert gemma.encode(text, add_special_tokens=False) == result["prompt_ids"]
        assert gemma.decode(result["output_ids"][: result["first_eos"]]) == result["output_text"]


def test_the_real_files_give_their_special_tokens(smollm2: Tokenizer, gemma: Tokenizer) -> None:
    assert (smollm2.vocab_size, len(smollm2), len(smollm2.special_token_ids)) == (49152, 49152, 17)
    assert (smollm2.bos_token, smollm2.bos_token_id) == ("<|im_start|>", 1)
    assert (smollm2.eos_token, smollm2.eos_token_ids) == ("<|im_end|>", (2, 0, 4))
    assert [smollm2.id_to_token(i) for i in smollm2.eos_token_ids[1:]] == ["<|endoftext|>", "<reponame>"]
    assert (gemma.vocab_size, gemma.bos_token_id, gemma.eos_token_ids) == (262144, 2, (1, 106))
    assert gemma.id_to_token(212) == "</s>"  # the end of struck-out text in HTML, no end of a text
    assert {105, 106} <= gemma.special_token_ids
    assert 107 not in gemma.special_token_ids  # a newline is user-defined: text
    assert gemma.chat_template is None


def test_the_vocabulary_keeps_its_ids(
    smollm2_fields: dict[str, Any], smollm2: Tokenizer, gemma_fields: dict[str, Any], gemma: Tokenizer
) -> None:
    for fields, tokenizer in ((smollm2_fields, smollm2), (gemma_fields, gemma)):
        tokens = fields["tokenizer.ggml.tokens"]
        assert [tokenizer.id_to_token(token_id) for token_id in range(len(tokens))] == tokens


def test_smollm2_splits_digits_and_adds_no_bos(smollm2: Tokenizer) -> None:
    tokens = [smollm2.id_to_token(token_id) for token_id in smollm2.encode("in 1234 we're 5x")]
    assert tokens == ["in", "Ġ", "1", "2", "3", "4", "Ġwe", "'re", "Ġ", "5", "x"]


def test_gemma_takes_runs_of_spaces_and_newlines_as_one_token(gemma: Tokenizer) -> None:
    def tokens(text: str) -> list[str | None]:
        return [gemma.id_to_token(token_id) for token_id in gemma.encode(text, add_special_tokens=False)]

    assert tokens("a   b\n\n\tc") == ["a", "   ", "b", "\n\n", "\t", "c"]
    assert tokens(" " * 33 + "x") == [" " * 31, "  ", "x"]
    assert tokens("the cat") == ["the", "▁cat"]  # no dummy prefix
    assert gemma.encode("<start_of_turn>user", add_special_tokens=False)[0] == 105


def test_gemma_is_built_quickly(gemma_fields: dict[str, Any]) -> None:
    start = time.process_time()
    tokenizer_from_gguf(gemma_fields)
    assert time.process_time() - start < 6  # 1.5 s on two idle cores


def test_llama_adds_bos_and_a_dummy_space_unless_told() -> None:
    tokenizer = built(LLAMA)
    assert tokenizer.encode("a") == [1, 6]
    assert tokenizer.decode([1, 6, 6]) == "a a"
    assert built(LLAMA, add_bos_token=False).encode("a") == [6]
    assert built(LLAMA, add_space_prefix=False).encode("a") == [1, 4]
    assert built(LLAMA, add_eos_token=True).encode("a") == [1, 6, 2]
    assert built(LLAMA, bos_token_id=None).encode("a") == [6]


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = built(LLAMA, add_space_prefix=False)
    ids = tokenizer.encode("a<tool>a  b<turn>", add_special_tokens=False)
    assert ids == [4, 8, 4, 9, 5, 10]
    assert tokenizer.decode(ids) == "a<tool>a  b"
    assert tokenizer.special_token_ids == {0, 1, 2, 10}


def test_gpt2_adds_bos_only_where_the_metadata_or_the_family_says() -> None:
    assert built(GPT2).encode("ab") == [3]
    assert built(GPT2, add_bos_token=True).encode("ab") == [0, 3]
    assert built(GPT2, pre="llama-bpe").encode("ab") == [0, 3]
    assert built(GPT2, pre="llama-bpe", add_bos_token=False).encode("ab") == [3]
    assert built(GPT2, pre="llama-bpe", bos_token_id=None).encode("ab") == [3]


def test_ends_of_turn_and_message_are_eos_too() -> None:
    assert built(LLAMA, eot_token_id=10, eom_token_id=2).eos_token_ids == (2, 10)
    tokenizer = built(GPT2, eot_token_id=8)
    assert tokenizer.eos_token_ids == (0, 8)
    assert tokenizer.decode([1, 8]) == "a"  # what ends a text is no text


def test_both_chat_templates_are_read() -> None:
    fields = LLAMA | {"tokenizer.chat_template": "plain{{ bos_token }}", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = tokenizer_from_gguf(fields)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "plain<s>"
    assert tokenizer.render_chat(messages, tools=[{"name": "f"}]) == "tools"


def test_ends_are_found_by_their_text_where_the_file_names_but_one() -> None:
    tokens = ["a", "<|endoftext|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "</s>", "<EOT>", "<|file_sep|>"]
    fields = {"tokens": tokens, "token_type": [1, 3, 4, 1, 3, 1, 3, 3], "merges": [], "eos_token_id": 2}
    tokenizer = built(GPT2, **fields, bos_token_id=None)
    assert tokenizer.eos_token_ids == (2, 3, 1, 4, 7, 6)
    assert tokenizer.special_token_ids == {1, 2, 3, 4, 6, 7}
    assert tokenizer.encode("a<|end|>a") == [0, 3, 0]
    assert tokenizer.decode([0, 2, 3, 4, 5, 0]) == "a</s>a"


def test_the_end_of_one_message_of_several_is_no_end() -> None:
    tokens = ["a", "<|return|>", "<|call|>", "<|end|>"]
    fields = {"tokens": tokens, "token_type": [1, 3, 3, 3], "merges": [], "bos_token_id": None}
    assert built(GPT2, **fields, eos_token_id=1).eos_token_ids == (1, 2)
    assert built(GPT2, **fields, eos_token_id=3).eos_token_ids == (3, 1, 2)  # the file's own word stands


def test_special_tokens_in_a_text_are_taken_as_such_whatever_stands_beside_them(hard_texts: list[str]) -> None:
    tokenizer = built(LLAMA, add_space_prefix=False)
    for text in hard_texts:
        plain = tokenizer.encode(text, add_special_tokens=False)
        joined = tokenizer.encode(f"<turn>{text}<turn>", add_special_tokens=False)
        if "<s>" not in text:
            assert joined == [10, *plain, 10], text


def test_phi3_drops_the_spaces_behind_its_added_tokens() -> None:
    tokens = [*LLAMA["tokenizer.ggml.tokens"], "<|end|>", "<|endoftext|>"]
    kinds, scores = [*LLAMA["tokenizer.ggml.token_type"], 3, 3], [*LLAMA["tokenizer.ggml.scores"], 0.0, 0.0]
    fields = {"tokens": tokens, "token_type": kinds, "scores": scores, "add_space_prefix": False}
    text = "a<|end|> \n a<|endoftext|> a"
    phi3 = built(LLAMA | {"general.architecture": "phi3"}, **fields)
    assert phi3.encode(text, add_special_tokens=False) == [4, 11, 4, 12, 6]
    llama = built(LLAMA | {"general.architecture": "llama"}, **fields)
    assert llama.encode("a<|end|> a", add_special_tokens=False) == [4, 11, 6]


def test_any_chat_template_of_the_file_can_be_chosen_by_its_name() -> None:
    fields = LLAMA | {"tokenizer.chat_template": "plain", "tokenizer.chat_template.rag": "documents"}
    tokenizer = tokenizer_from_gguf(fields)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, chat_template="rag") == "documents"
    assert tokenizer.render_chat(messages, chat_template="{{ messages[0].content }}") == "hi"
    assert tokenizer.named_chat_templates == {"default": "plain", "rag": "documents"}


def test_an_empty_token_keeps_its_id_and_never_matches() -> None:
    for base in (LLAMA, GPT2):
        tokens = list(base["tokenizer.ggml.tokens"])
        tokens[8] = ""
        tokenizer = built(base, tokens=tokens)
        assert tokenizer.vocab_size == len(tokens)
        assert 8 not in tokenizer.encode("ab ab")
        assert tokenizer.decode([4, 8, 4]) == tokenizer.decode([4, 4])


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"model": "bert"}, "tokenizer.ggml.model is 'bert', known are gpt2, llama"),
        (LLAMA, {"model": None}, "tokenizer.ggml.model is None"),
        (LLAMA, {"tokens": None}, "no tokenizer.ggml.tokens"),
        (LLAMA, {"tokens": 3}, "tokenizer.ggml.tokens must be a list of strings, got int"),
        (LLAMA, {"scores": None}, "no tokenizer.ggml.scores"),
        (LLAMA, {"scores": [0.0]}, "1 tokenizer.ggml.scores, but 11 tokens"),
        (LLAMA, {"token_type": ["x"] * 11}, "tokenizer.ggml.token_type must be a list of numbers"),
        (LLAMA, {"eos_token_id": 11}, "eos_token_id is 11, but there are 11 tokens"),
        (LLAMA, {"add_bos_token": 1}, "add_bos_token must be true or false, got 1"),
        (
            LLAMA,
            {"add_bos_token": True, "bos_token_id": None},
            "add_bos_token = true but no tokenizer.ggml.bos_token_id",
        ),
        (GPT2, {"tokens": ["a"] * 9}, "lists the token 'a' twice"),
        (GPT2, {"pre": "klingon"}, "tokenizer.ggml.pre is 'klingon', known are default, gpt-2,"),
        (GPT2, {"pre": ["qwen2"]}, r"tokenizer.ggml.pre is \['qwen2'\], known are default, gpt-2,"),
        (GPT2, {"merges": None}, "no tokenizer.ggml.merges, which model 'gpt2' needs"),
        (GPT2, {"token_type": [float("inf")] * 9}, "token_type must be whole numbers"),
        (GPT2, {"merges": ["a 1"]}, r"merges\[0\] is 'a 1', which needs a missing token"),
    ],
)
def test_broken_metadata_is_refused_in_one_line(base: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        built(base, **changes)
    assert "\n" not in str(refusal.value)


def test_a_chat_template_that_is_no_string_is_refused() -> None:
    with pytest.raises(InputError, match=r"tokenizer.chat_template must be a string, got int"):
        tokenizer_from_gguf(LLAMA | {"tokenizer.chat_template": 3})


BROKEN = st.one_of(
    st.none(),
    st.integers(-3, 2**40),
    st.floats(),
    st.booleans(),
    st.text(max_size=4),
    st.lists(st.integers(-2, 12), max_size=11),
    st.lists(st.floats(), min_size=9, max_size=11),
    st.lists(st.sampled_from(["a", "b", "ab", "", " ", "a b", "\x00", "<|im_end|>", "</s>", "▁"]), max_size=11),
)
NAMES = ("model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eot_token_id", "add_bos_token")


@given(base=st.sampled_from([LLAMA, GPT2]), changes=st.dictionaries(st.sampled_from(NAMES), BROKEN, max_size=3))
@settings(derandomize=True, max_examples=400, deadline=None)
def test_corrupt_metadata_gives_a_tokenizer_or_one_line(base: dict[str, Any], changes: dict[str, Any]) -> None:
    tokenizer, refusal = None, "one line"
    try:
        tokenizer = built(base, **changes)
    except InputError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 500
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("ab <|im_end|>\x00 ab"))
