import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.text.detokenizer import Detokenizer, TextDelta
from jaxllm.text.tokenizer import Tokenizer

modest = settings(derandomize=True, max_examples=60, deadline=None)

PIECES = st.sampled_from(
    [
        "👨‍👩‍👧‍👦",
        "🏳️‍🌈",
        "🫨",
        "é",
        "e\u0301",
        "한국어",
        "日本語",
        "漢",
        "የኢትዮጵያ",
        "नमस्ते",
        "ܐܠܦ",
        "𓀀𒁀",
        " ",
        "  ",
        "\n\n",
        "\t",
        "a",
        "Hello",
        " world",
        "\ufffd",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=12).map("".join)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def in_pushes(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Cuts ids into pushes of the given sizes, taken round and round."""
    pushes, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pushes.append(list(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return pushes or [[]]


def run(
    tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int] = (1,), **params: Any
) -> tuple[Detokenizer, list[TextDelta]]:
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    pushes = in_pushes(ids, sizes)
    deltas = [detokenizer.push(push, finished=number == len(pushes)) for number, push in enumerate(pushes, 1)]
    assert detokenizer.text == "".join(delta.text for delta in deltas)
    return detokenizer, deltas


@given(text=TEXTS, sizes=SIZES)
@modest
def test_deltas_of_any_split_join_to_the_text(real: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = real.encode(text, add_special_tokens=False)
    detokenizer, deltas = run(real, ids, sizes)
    assert detokenizer.text == real.decode(ids) == real.backend.decode(ids)
    assert detokenizer.num_tokens_used == len(ids)
    if "\ufffd" not in real.decode(ids):  # some rare bytes are no token of SmolLM2
        assert not any("\ufffd" in delta.text for delta in deltas)


@given(data=st.data(), sizes=SIZES, skip=st.booleans())
@modest
def test_deltas_of_random_tokens_join_to_what_decode_gives(
    real: Tokenizer, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    byte_ids = [i for byte in range(256) if (i := real.token_to_id(f"<0x{byte:02X}>")) is not None]
    anything = st.integers(0, real.vocab_size + 3)
    ids = data.draw(st.lists(st.sampled_from(byte_ids) | anything if byte_ids else anything, max_size=24))
    detokenizer, _ = run(real, ids, sizes, skip_special_tokens=skip)
    assert detokenizer.text == real.decode(ids, skip_special_tokens=skip)


def test_a_character_of_several_tokens_comes_whole_and_at_once(real: Tokenizer) -> None:
    ids = real.encode("𓀀", add_special_tokens=False)
    assert len(ids) >= 4
    _, deltas = run(real, [*ids, *ids])
    assert [delta.text for delta in deltas if delta.text] == ["𓀀", "𓀀"]
    assert deltas[len(ids) - 1].text == "𓀀"


def test_an_unfinished_character_is_given_as_replacement_at_the_end(real: Tokenizer) -> None:
    ids = real.encode("𓀀", add_special_tokens=False)[:-1]
    detokenizer, deltas = run(real, ids)
    assert set(detokenizer.text) == {"\ufffd"}
    assert all(not delta.text for delta in deltas[:-1])
    assert detokenizer.text == real.decode(ids)


@given(text=TEXTS.filter(lambda text: len(text) > 2), data=st.data(), sizes=SIZES, include=st.booleans())
@modest
def test_stop_strings_cut_the_text_wherever_tokens_and_pushes_split_it(
    real: Tokenizer, text: str, data: st.DataObject, sizes: list[int], include: bool
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    ids = real.encode(text, add_special_tokens=False)
    decoded = real.decode(ids)  # NFC or a dummy space may make it another text
    detokenizer, deltas = run(real, ids, sizes, stop=[stop], include_stop_str_in_output=include)
    end = decoded.find(stop)
    if end < 0:
        assert (detokenizer.text, detokenizer.stop) == (decoded, None)
        return
    assert detokenizer.text == decoded[: end + (len(stop) if include else 0)]
    assert detokenizer.stop == stop
    assert [delta.stop for delta in deltas if delta.stop] == [stop]
    needed = next(n for n in range(len(ids) + 1) if stop in settled_text(real, ids, n))
    assert detokenizer.num_tokens_used == needed


def settled_text(tokenizer: Tokenizer, ids: list[int], count: int) -> str:
    """Text that the first tokens settle, whatever follows."""
    stream = tokenizer.stream()
    return stream.push(ids[:count]) + (stream.flush() if count == len(ids) else "")


def test_text_that_may_become_a_stop_string_waits(smollm2: Tokenizer) -> None:
    letters = [smollm2.encode(char)[0] for char in "ab#"]
    a, b, mark = letters
    detokenizer = Detokenizer(smollm2, SamplingParams(stop=["###"]))
    pushed = [detokenizer.push([token], finished=False).text for token in (a, mark, mark, b, mark)]
    assert pushed == ["a", "", "", "##b", ""]
    assert detokenizer.push([], finished=True).text == "#"


def test_the_stop_string_that_is_complete_first_wins_and_the_longest_of_a_tie(smollm2: Tokenizer) -> None:
    ids = [smollm2.encode(char)[0] for char in "xabcabd"]
    assert run(smollm2, ids, [7], stop=["abcab", "bc"])[0].stop == "bc"
    longest, _ = run(smollm2, ids, [7], stop=["b", "ab"])
    assert (longest.stop, longest.text, longest.num_tokens_used) == ("ab", "x", 3)
    overlapping, _ = run(smollm2, ids, [2], stop="abd")
    assert (overlapping.stop, overlapping.text) == ("abd", "xabc")


def test_nothing_comes_after_a_stop_and_its_tokens_do_not_count(smollm2: Tokenizer) -> None:
    ids = [smollm2.encode(char)[0] for char in "one. two. three"]
    detokenizer = Detokenizer(smollm2, SamplingParams(stop="."))
    assert detokenizer.push(ids[:8], finished=False) == TextDelta("one", ".")
    assert detokenizer.push(ids[8:], finished=True) == TextDelta("", None)
    assert (detokenizer.text, detokenizer.num_tokens_used) == ("one", 4)


def test_the_text_of_a_stop_token_is_left_out_unless_asked_for(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hello world")
    for include, text in ((False, "Hello"), (True, "Hello world")):
        params = SamplingParams(stop_token_ids=[ids[-1]], include_stop_str_in_output=include)
        detokenizer = Detokenizer(smollm2, params)
        delta = detokenizer.push(ids, finished=True, drop_last=True)
        assert (delta.text, delta.stop, detokenizer.num_tokens_used) == (text, None, 2)


def test_what_waits_for_a_stop_string_is_given_when_a_stop_token_ends_it(smollm2: Tokenizer) -> None:
    ids = [smollm2.encode(char)[0] for char in "a#b"]
    detokenizer = Detokenizer(smollm2, SamplingParams(stop="##"))
    assert detokenizer.push(ids, finished=True, drop_last=True).text == "a#"


@pytest.mark.parametrize(("skip", "text"), [(True, "Hello"), (False, "Hello<|im_end|>")])
def test_special_tokens_are_text_only_when_not_skipped(smollm2: Tokenizer, skip: bool, text: str) -> None:
    ids = [*smollm2.encode("Hello"), smollm2.eos_token_id]
    detokenizer, _ = run(smollm2, ids, skip_special_tokens=skip)
    assert (detokenizer.text, detokenizer.num_tokens_used) == (text, 2)


def test_without_tokenizer_or_detokenize_only_tokens_are_counted(smollm2: Tokenizer) -> None:
    for detokenizer in (
        Detokenizer(None, SamplingParams()),
        Detokenizer(smollm2, SamplingParams(detokenize=False)),
    ):
        assert detokenizer.push([1, 2, 3], finished=False) == TextDelta("", None)
        assert detokenizer.push([4], finished=True, drop_last=True) == TextDelta("", None)
        assert (detokenizer.text, detokenizer.num_tokens_used) == ("", 4)


def test_the_real_outputs_stream_to_the_reference_text(
    smollm2: Tokenizer, gemma: Tokenizer, golden: Callable[[str], list[dict[str, Any]]]
) -> None:
    for name, tokenizer in (("smollm2", smollm2), ("gemma3", gemma)):
        for result in golden(name):
            end = result["first_eos"]
            ids = result["output_ids"][: None if end is None else end + 1]
            assert run(tokenizer, ids)[0].text == result["output_text"]


def test_a_token_costs_the_same_however_long_the_text_is(real: Tokenizer) -> None:
    ids = real.encode("All work and no play makes Jack a dull boy. 🫨𓀀 " * 40, add_special_tokens=False)
    detokenizer = Detokenizer(real, SamplingParams(stop=["\n\nHuman:", "boy!" * 50]))

    def seconds(rounds: int) -> float:
        times = []
        for _ in range(rounds):
            start = time.process_time()
            for token_id in ids:
                detokenizer.push([token_id], finished=False)
            times.append(time.process_time() - start)
        return min(times)

    early = seconds(5)
    seconds(40)
    late = seconds(5)
    assert late < 3 * early
