import pytest

from jaxllm.api.logprobs import FlatLogprobs, Logprob, LogprobWriter
from jaxllm.engine.scores import TokenScores
from jaxllm.text.token_texts import TokenTexts

POSITIONS = [
    {5: Logprob(-0.1, 1, "a"), 7: Logprob(-2.5, 2, "b")},
    {9: Logprob(-0.7, 3, None)},
    {1: Logprob(-1.0, 1, ""), 2: Logprob(-1.5, 2, "c"), 3: Logprob(-9.0, None, "d")},
]


def test_a_flat_container_reads_as_the_list_of_dictionaries_that_it_holds():
    flat = FlatLogprobs()
    flat.extend(POSITIONS)
    assert len(flat) == 3
    assert list(flat) == POSITIONS
    assert flat[-1] == POSITIONS[-1]
    assert list(flat[1:]) == POSITIONS[1:]
    assert isinstance(flat[1:], FlatLogprobs)
    assert flat.token_ids == [5, 7, 9, 1, 2, 3]
    assert (flat.start_indices, flat.end_indices) == ([0, 2, 3], [2, 3, 6])
    assert flat.ranks == [1, 2, 3, 1, 2, None]
    with pytest.raises(IndexError):
        flat[3]


def test_a_flat_container_takes_an_empty_position_and_another_flat_one():
    flat, copy = FlatLogprobs(), FlatLogprobs()
    flat.append(None)
    flat.append(POSITIONS[0])
    copy.extend(flat)
    assert list(copy) == [{}, POSITIONS[0]]
    assert copy == flat
    assert copy != flat[1:]


@pytest.mark.parametrize("flat", [False, True])
def test_a_token_that_is_named_twice_has_one_entry_with_the_rank_that_is_known(flat: bool, bytes_tokenizer):
    scores = TokenScores((98, 97, 98, 97, 120), (-1.0, -0.5, -1.0, -0.5, -7.0), (2, 1, 2, 0, 0))
    writer = LogprobWriter(TokenTexts(bytes_tokenizer), flat)
    container = writer.container()
    writer.write([scores], container)
    (position,) = container
    assert position == {
        98: Logprob(-1.0, 2, "b"),
        97: Logprob(-0.5, 1, "a"),
        120: Logprob(-7.0, None, "x"),
    }
    assert next(iter(position)) == 98


def test_alternatives_are_read_behind_the_text_so_far(bytes_tokenizer):
    first, second, third = "€".encode()
    writer = LogprobWriter(TokenTexts(bytes_tokenizer), flat=False)
    container = writer.container()
    writer.write([TokenScores((byte, 97), (-1.0, -2.0), (1, 2)) for byte in (first, second, third)], container)
    assert [position[byte].decoded_token for position, byte in zip(container, "€".encode(), strict=True)] == [
        "",
        "",
        "€",
    ]
    assert container[0][97].decoded_token == "a"
    assert container[2][97].decoded_token == "\ufffda"


def test_without_a_tokenizer_there_are_numbers_only():
    writer = LogprobWriter(None, flat=False)
    container = writer.prompt_container()
    writer.write([None, TokenScores((3,), (-1.0,), (1,))], container)
    assert container == [None, {3: Logprob(-1.0, 1, None)}]
