import pytest

from jaxllm.api.scoring import join, pair_with
from jaxllm.config.errors import InputError


def letters(prompt, index):
    return [prompt[-1] + 1]


def test_one_prompt_serves_all_continuations_and_several_need_one_each():
    assert pair_with(["a"], ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert pair_with(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
    with pytest.raises(InputError, match="2 prompts and 1 continuations"):
        pair_with(["a", "b"], ["c"])


def test_text_is_tokenized_as_one_and_spaces_between_count_to_the_continuation(bytes_tokenizer):
    for prompt, continuation in (("xy ", "z"), ("xy", " z")):
        joined = join(prompt, continuation, bytes_tokenizer)
        assert (joined.prompt().token_ids, joined.num_context) == (list(b"xy z"), 2)
    joined = join([1, 2], "ab", bytes_tokenizer)
    assert (joined.prompt().token_ids, joined.num_context) == ([1, 2, 97, 98], 2)
    joined = join({"prompt": "ab", "cache_salt": "mine"}, [9], bytes_tokenizer)
    assert (joined.prompt().token_ids, joined.num_context) == ([97, 98, 9], 2)
    assert joined.prompt().cache_salt == "mine"


@pytest.mark.parametrize(
    ("prompt", "continuation", "message"),
    [
        ("", "a", "the prompt is empty"),
        ([], [1], "the prompt is empty"),
        ("a", "", "the continuation is empty"),
        ([1], [], "the continuation is empty"),
        ([1], [2**40], "token ids must be below"),
    ],
)
def test_what_cannot_be_scored_is_refused(bytes_tokenizer, prompt, continuation, message):
    with pytest.raises(InputError, match=message):
        join(prompt, continuation, bytes_tokenizer)


def test_scores_are_those_of_the_continuations_tokens_only(scripted_llm):
    llm, engine = scripted_llm(letters)
    scores = llm.score(["abc", [5, 6]], ["de", [0, 200]])
    assert [score.token_ids for score in scores] == [list(b"de"), [0, 200]]
    assert scores[1].logprobs == pytest.approx([-0.01 - 0.002, -2.01 - 0.003])
    assert scores[1].ranks == [1, 201]
    assert scores[1].total == pytest.approx(-2.025)
    assert [score.is_greedy for score in scores] == [False, False]
    assert llm.score([5, 6], [[0], [1]])[0].is_greedy
    assert engine._living == {}


def test_a_mistake_names_the_continuation_and_nothing_runs(scripted_llm):
    llm, engine = scripted_llm(letters)
    with pytest.raises(InputError, match="continuation 1: the continuation is empty"):
        llm.score("abc", ["d", ""])
    with pytest.raises(InputError, match=r"continuation 1: .*1,000 tokens, but max_model_len 1,000"):
        llm.score("abc", ["d", "x" * 997])
    assert engine.times.num_steps == 0


def test_only_so_many_requests_are_in_the_engine_at_once_and_their_order_stays(scripted_llm, monkeypatch):
    from jaxllm.api import llm as module

    monkeypatch.setattr(module, "_MOST_SCORED", 3)
    llm, engine = scripted_llm(letters)
    most: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (most.append(len(engine._living)), step())[1])
    scores = llm.score([5, 6], [[token] for token in range(10)])
    assert [score.token_ids for score in scores] == [[token] for token in range(10)]
    assert [score.ranks for score in scores] == [[token + 1] for token in range(10)]
    assert most == [3, 3, 3, 1]
