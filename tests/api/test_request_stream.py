"""One request's updates -> what its user gets, however steps and samples split it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.api.errors import RequestError
from jaxllm.api.logprobs import FlatLogprobs
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.api.request_stream import RequestStream
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.scores import RequestScores, TokenScores
from jaxllm.scheduler.request import RequestUpdate
from jaxllm.text.token_texts import TokenTexts

modest = settings(derandomize=True, max_examples=80, deadline=None)
PIECES = st.sampled_from(["👨‍👩‍👧‍👦", "é", "日本語", "𓀀", "stop", "st", "op", "a", " ", "\n", "\x00", "END"])
TEXTS = st.lists(PIECES, min_size=1, max_size=12).map("".join)


@pytest.fixture(scope="module")
def texts(bytes_tokenizer):
    return TokenTexts(bytes_tokenizer)


def follow(tokenizer, texts, **params: Any) -> RequestStream:
    return RequestStream("r", TokenizedPrompt([1, 2], "xy"), SamplingParams(**params), tokenizer, texts)


def update(tokens, name: str = "r", reason=None, stop=None, prompt=None) -> RequestUpdate:
    scores = tuple(TokenScores((token,), (-token / 8,), (1,)) for token in tokens)
    return RequestUpdate(name, tuple(tokens), reason, stop, scores=RequestScores(scores, prompt))


def pushes(ids: list[int], sizes: list[int]) -> list[list[int]]:
    groups, start = [], 0
    while start < len(ids):
        size = sizes[len(groups) % len(sizes)]
        groups.append(ids[start : start + size])
        start += size
    return groups


@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), flat=st.booleans(), include=st.booleans())
@modest
def test_streamed_text_tokens_and_scores_equal_the_whole_for_every_split(
    bytes_tokenizer, texts, text: str, sizes: list[int], flat: bool, include: bool
):
    options: dict[str, Any] = {"stop": ["stop", "END"], "include_stop_str_in_output": include, "logprobs": 0}
    ids = bytes_tokenizer.encode(text)
    parts = follow(bytes_tokenizer, texts, **options, flat_logprobs=flat)
    groups = pushes(ids, sizes)
    deltas = [parts.take(update(group, reason="length" if group is groups[-1] else None)) for group in groups]
    whole = follow(bytes_tokenizer, texts, **options)
    whole.take(update(ids, reason="length"))
    expected, got = whole.output().outputs[0], parts.output().outputs[0]

    readable = text.replace("\x00", "")  # the special token
    ends = [(end, stop) for stop in ("stop", "END") if (end := readable.find(stop)) >= 0]
    stop_at = min(ends, default=None, key=lambda found: found[0] + len(found[1]))
    if stop_at is None:
        assert (expected.text, expected.finish_reason, expected.token_ids) == (readable, "length", ids)
    else:
        assert expected.text == readable[: stop_at[0] + len(stop_at[1]) * include]
        assert (expected.finish_reason, expected.stop_reason) == ("stop", stop_at[1])
    assert "".join(delta.text for delta in deltas) == got.text == expected.text
    assert [token for delta in deltas for token in delta.token_ids] == got.token_ids == expected.token_ids
    assert [position for delta in deltas for position in delta.logprobs or ()] == list(got.logprobs or ())
    assert list(got.logprobs or ()) == expected.logprobs
    assert isinstance(got.logprobs, FlatLogprobs) is flat
    assert got.cumulative_logprob == pytest.approx(sum(-token / 8 for token in got.token_ids))
    assert len(expected.logprobs or ()) == len(expected.token_ids)


def test_a_stop_string_ends_its_own_sample_and_the_request_goes_on(bytes_tokenizer, texts):
    stream = follow(bytes_tokenizer, texts, n=3, stop="b", logprobs=1)
    assert stream.sample_ids == ("0_r", "1_r", "2_r")
    stream.take(update(b"a", "0_r"))
    ended = stream.take(update(b"ab", "1_r"))
    assert (ended.index, ended.text, ended.finish_reason, ended.stop_reason) == (1, "a", "stop", "b")
    assert not stream.finished
    assert stream.take_left_over() == ("1_r",)
    assert stream.take_left_over() == ()
    late = stream.take(update(b"x", "1_r"))
    assert (late.text, late.token_ids, late.finish_reason) == ("", (), None)
    stream.take(update(b"c", "0_r", "length"))
    stream.take(RequestUpdate("1_r", finish_reason="abort"))
    assert not stream.finished
    stream.take(update(b"zz", "2_r", "length"))
    assert stream.finished
    output = stream.output()
    assert output.finished
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert [each.text for each in output.outputs] == ["ac", "a", "zz"]
    assert [each.finish_reason for each in output.outputs] == ["length", "stop", "length"]
    assert [len(each.logprobs or ()) for each in output.outputs] == [2, 2, 2]
    assert stream.take_left_over() == ()


def test_tokens_past_a_stop_string_are_neither_counted_nor_scored(bytes_tokenizer, texts):
    stream = follow(bytes_tokenizer, texts, stop="b", logprobs=0)
    delta = stream.take(update(b"abcd", reason="length"))
    assert (delta.text, delta.token_ids, delta.num_output_tokens) == ("a", (97, 98), 2)
    assert len(delta.logprobs or ()) == 2
    assert delta.cumulative_logprob == pytest.approx(-(97 + 98) / 8)
    assert stream.take_left_over() == ()


def test_the_token_that_ended_the_output_is_scored_though_its_text_is_not_there(bytes_tokenizer, texts):
    stream = follow(bytes_tokenizer, texts, stop_token_ids=[99], logprobs=0)
    delta = stream.take(update(b"abc", reason="stop", stop=99))
    assert (delta.text, delta.token_ids, len(delta.logprobs or ())) == ("ab", (97, 98, 99), 3)


def test_without_logprobs_there_are_none(bytes_tokenizer, texts):
    stream = follow(bytes_tokenizer, texts)
    stream.take(RequestUpdate("r", (97,), "length"))
    output = stream.output()
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
    assert output.prompt_logprobs is None


def test_the_prompts_scores_come_once_with_the_first_token_whichever_sample_brings_it(bytes_tokenizer, texts):
    stream = follow(bytes_tokenizer, texts, n=2, prompt_logprobs=0)
    prompt = (None, TokenScores((2,), (-0.25,), (4,)))
    first = stream.take(update(b"a", "1_r", prompt=prompt))
    second = stream.take(update(b"a", "0_r", prompt=prompt))
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert (first.prompt_logprobs[1] or {})[2].rank == 4
    assert second.prompt_logprobs is None
    assert stream.output().prompt_logprobs == first.prompt_logprobs


def test_without_detokenizing_tokens_have_scores_and_no_text(bytes_tokenizer, texts):
    stream = follow(bytes_tokenizer, texts, detokenize=False, logprobs=0)
    delta = stream.take(update(b"ab", reason="length"))
    assert (delta.text, delta.token_ids) == ("", (97, 98))
    assert [position[token].decoded_token for position, token in zip(delta.logprobs or (), b"ab", strict=True)] == [
        None,
        None,
    ]


def test_an_error_ends_all_samples_and_names_those_that_still_run(bytes_tokenizer, texts):
    stream = follow(bytes_tokenizer, texts, n=2)
    with pytest.raises(RequestError, match="out of luck"):
        stream.take(RequestUpdate("0_r", finish_reason="error", error="out of luck"))
    assert stream.finished
    assert stream.take_left_over() == ("1_r",)
    assert [each.finish_reason for each in stream.output().outputs] == ["error", "error"]


def test_times_are_those_of_the_first_and_last_token_of_any_sample(bytes_tokenizer, texts, monkeypatch):
    from jaxllm.api import request_stream

    now = [10.0]
    monkeypatch.setattr(request_stream.time, "monotonic", lambda: now[0])
    stream = follow(bytes_tokenizer, texts, n=2)
    assert stream.metrics.time_per_output_token is None
    for name, tokens, reason in (("0_r", b"a", None), ("1_r", b"abc", "length"), ("0_r", b"b", "length")):
        now[0] += 1.0
        stream.take(update(tokens, name, reason))
    metrics = stream.metrics
    assert (metrics.time_to_first_token, metrics.e2e_latency, metrics.time_in_queue) == (1.0, 3.0, None)
    assert metrics.time_per_output_token == (13.0 - 11.0) / (3 - 1)
