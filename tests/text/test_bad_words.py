import pytest

from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.text.bad_words import with_bad_word_ids
from jaxllm.text.tokenizer import Tokenizer


def test_a_word_counts_as_it_begins_a_text_and_as_it_follows_a_space(smollm2: Tokenizer) -> None:
    params = with_bad_word_ids(SamplingParams(bad_words=["Paris", " the"]), smollm2)
    spellings = {smollm2.decode(ids) for ids in params.bad_word_token_ids}
    assert spellings == {"Paris", " Paris", "the", " the"}
    assert all(smollm2.decode(ids).strip() in ("Paris", "the") for ids in params.bad_word_token_ids)


def test_a_spelling_with_more_tokens_behind_a_space_does_not_count_twice(smollm2: Tokenizer) -> None:
    params = with_bad_word_ids(SamplingParams(bad_words=["1"]), smollm2)
    assert params.bad_word_token_ids == (tuple(smollm2.encode("1")),)  # " 1" is two tokens here


def test_without_bad_words_nothing_changes_and_without_a_tokenizer_they_are_refused(smollm2: Tokenizer) -> None:
    params = SamplingParams()
    assert with_bad_word_ids(params, None) is params
    filled = with_bad_word_ids(SamplingParams(bad_words=["Paris"]), smollm2)
    assert with_bad_word_ids(filled, None) is filled
    with pytest.raises(InputError, match="bad_words need a tokenizer"):
        with_bad_word_ids(SamplingParams(bad_words=["Paris"]), None)
