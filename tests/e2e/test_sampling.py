"""Every sampling field through the whole engine: what it does to the tokens, and that nothing else changes them."""

import itertools
from typing import Any

import numpy as np
import pytest

from jaxllm import LogitsProcessor, SamplingParams
from jaxllm.config.errors import InputError

V = 320
OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 400, "max_logprobs": -1}


def push(logits, parameters):
    """Adds a number to one token's logit."""
    return logits.at[parameters["token"]].add(parameters["amount"])


def never_twice(logits, parameters):
    return logits.at[parameters["last_token"]].add(-1e4)


PROCESSORS = {
    "push": LogitsProcessor(function=push, parameters={"token": 0, "amount": 0.0}),
    "never_twice": LogitsProcessor(function=never_twice),
}


@pytest.fixture(scope="module")
def driver(engine_of):
    with engine_of("llama", **OPTIONS, logprobs_mode="raw_logits", logits_processors=PROCESSORS) as driver:
        yield driver


@pytest.fixture(scope="module")
def prompt(golden_cases):
    return golden_cases("llama")[2]["prompt_ids"]


@pytest.fixture
def generate(driver):
    """Runs one request; gives its tokens, and the raw logits [V] that each was chosen from."""

    def run(prompt, **options):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": -1, **options})
        name = f"request {len(driver.ends)}"
        driver.add(name, prompt, params)
        driver.run()
        assert driver.errors[name] is None
        logits = []
        for told in driver.scores.get(name, ()):
            row = np.empty(V)
            row[list(told.token_ids[1:])] = told.scores[1:]
            logits.append(row)
        return driver.tokens[name], logits

    return run


def test_penalties_change_the_choice_as_published(generate, prompt):
    numbers = {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 1.1}
    tokens, logits = generate(prompt, **numbers, max_tokens=24)
    plain, _ = generate(prompt, max_tokens=24)
    seen_output = np.zeros(V)
    in_prompt = np.isin(np.arange(V), prompt)
    for token, row in zip(tokens, logits, strict=True):
        factor = np.where(in_prompt | (seen_output > 0), 1.4, 1.0)
        expected = np.where(row > 0, row / factor, row * factor) - 0.7 * seen_output - 1.1 * (seen_output > 0)
        assert token == expected.argmax()
        seen_output[token] += 1
    assert tokens != plain


def test_biases_masks_and_processors_change_single_logits(generate, prompt):
    plain, _ = generate(prompt)
    assert generate(prompt, logit_bias={7: 100})[0] == [7] * 12
    assert plain[0] not in generate(prompt, logit_bias={plain[0]: -100})[0][:1]
    allowed = [3, 9, 31, 32, 300]
    tokens, logits = generate(prompt, allowed_token_ids=allowed)
    assert tokens == [allowed[int(np.argmax(row[allowed]))] for row in logits]
    assert generate(prompt, extra_args={"push": {"token": 17, "amount": 100.0}})[0] == [17] * 12
    both = {"push": {"token": 17, "amount": 100.0}, "never_twice": {}}
    tokens, _ = generate(prompt, extra_args=both)
    assert all(a != b for a, b in itertools.pairwise(tokens))
    assert tokens.count(17) == 6
    assert generate(prompt, extra_args={"push": {}})[0] == plain  # its default adds nothing


def test_min_tokens_keeps_stop_tokens_away(generate, prompt):
    plain, _ = generate(prompt)
    stopped, _ = generate(prompt, stop_token_ids=[plain[2]])
    assert stopped == plain[:3]
    longer, logits = generate(prompt, stop_token_ids=[plain[2]], min_tokens=6)
    assert len(longer) >= 6
    assert plain[2] not in longer[:6]
    for token, row in zip(longer[:6], logits, strict=False):
        row[plain[2]] = -np.inf
        assert token == row.argmax()


def test_bad_words_never_come_whole(generate, prompt):
    plain, _ = generate(prompt)
    word = tuple(plain[3:6])
    tokens, logits = generate(prompt, bad_word_token_ids=(word,))
    assert tokens[:5] == plain[:5]  # its beginning may come
    assert tokens[5] != plain[5]
    logits[5][plain[5]] = -np.inf
    assert tokens[5] == logits[5].argmax()
    first, _ = generate(prompt, bad_word_token_ids=((plain[0],), word))
    assert plain[0] not in first
    everywhere = [word, tuple(plain[0:2])]
    tokens, _ = generate(prompt, bad_word_token_ids=tuple(everywhere), max_tokens=30)
    for bad in everywhere:
        assert all(tuple(tokens[i : i + len(bad)]) != bad for i in range(len(tokens)))


def test_logprobs_agree_with_the_reference(engine_of, golden_cases):
    with engine_of("llama", **OPTIONS) as driver:
        for i, case in enumerate(golden_cases("llama")):
            params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=2, logprob_token_ids=[5])
            driver.add(f"out {i}", case["prompt_ids"], params)
            whole = case["prompt_ids"] + case["output_ids"]
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=i, prompt_logprob_start=i)
            driver.add(f"in {i}", whole, params)
        driver.run()
        for i, case in enumerate(golden_cases("llama")):
            told = driver.scores[f"out {i}"]
            assert [each.token_ids[0] for each in told] == case["output_ids"]
            np.testing.assert_allclose([each.scores[0] for each in told], case["logprobs"], atol=1e-4)
            assert all(each.ranks[:3] == (1, 1, 2) and each.ranks[3] == 0 for each in told)
            assert all(each.token_ids[0] == each.token_ids[1] and each.token_ids[3] == 5 for each in told)
            gaps = [each.scores[1] - each.scores[2] for each in told]
            np.testing.assert_allclose(gaps, case["top2_gap"], rtol=1e-3, atol=1e-4)  # told to 4 digits
            num_prompt, page = len(case["prompt_ids"]), driver.prompt_scores[f"in {i}"]
            assert len(page) == num_prompt + 32
            assert [entry is None for entry in page[:10]] == [at < max(i, 1) for at in range(10)][: len(page)]
            np.testing.assert_allclose([each.scores[0] for each in page[num_prompt:]], case["logprobs"], atol=1e-4)
            assert all(len(each.token_ids) == 1 + i for each in page[num_prompt:])


def test_prompt_logprobs_do_not_depend_on_chunks_nor_on_cached_prefixes(engine_of, golden_cases):
    prompt = golden_cases("llama")[5]["prompt_ids"]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    pages = []
    for budget in (256, 33):
        with engine_of("llama", **OPTIONS | {"max_num_batched_tokens": budget}) as driver:
            for name in ("first", "again"):
                driver.add(name, prompt, params)
                driver.add(f"{name} neighbour", prompt[:60], params.replace(prompt_logprobs=None))
                driver.run()
                pages.append(driver.prompt_scores[name])
    for page in pages[1:]:
        assert [entry and entry.token_ids for entry in page] == [entry and entry.token_ids for entry in pages[0]]
        for mine, first in zip(page[1:], pages[0][1:], strict=True):
            np.testing.assert_allclose(mine.scores, first.scores, atol=1e-4)


def test_prompt_logprobs_of_the_whole_vocabulary(driver, prompt):
    driver.add("whole", prompt, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1))
    driver.run()
    page = driver.prompt_scores["whole"]
    assert page[0] is None
    assert all(sorted(entry.token_ids[1:]) == list(range(V)) for entry in page[1:])
    assert all(list(entry.scores[1:]) == sorted(entry.scores[1:], reverse=True) for entry in page[1:])


def test_one_token_has_nothing_before_it_to_be_scored_by(driver):
    driver.add("one", [5], SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1))
    driver.run()
    assert driver.prompt_scores["one"] == (None,)


def test_an_abort_amid_a_scored_prompt_leaves_nothing_behind(driver, golden_cases):
    driver.add("gone", golden_cases("llama")[5]["prompt_ids"], SamplingParams(max_tokens=2, prompt_logprobs=1))
    driver.step()
    driver.abort("gone")
    driver.run()
    assert not driver.engine._scores._prompts
    assert driver.ends["gone"] == "abort"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {V: 1.0}}, "logit_bias: token id 320 at position 0 is outside the vocabulary of 320"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids: token id -1 at position 1 is outside"),
        ({"bad_word_token_ids": ((1, 999),)}, "bad_words: token id 999"),
        ({"logprob_token_ids": [400]}, "logprob_token_ids: token id 400"),
        ({"bad_words": ["x"]}, "bad_words needs a tokenizer"),
        ({"extra_args": {"pull": {}}}, "no logits processor 'pull'; the engine was started with push, never_twice"),
        ({"extra_args": {"push": {"tokens": 1}}}, "unknown parameter 'tokens'; it has token, amount"),
        ({"extra_args": {"push": {"token": 1.5}}}, "token must be an integer as its default is, got a number"),
        ({"extra_args": {"push": {"amount": [1.0, 2.0]}}}, r"amount must be a number .* got float32 of shape \(2,\)"),
        ({"extra_args": {"push": 3}}, "must be a dictionary"),
    ],
)
def test_what_the_engine_cannot_do_is_one_line(driver, options, message):
    with pytest.raises(InputError, match=message) as caught:
        driver.engine.add("bad", [1, 2], SamplingParams(**options))
    assert "\n" not in str(caught.value)
    assert not driver.engine.has_work


def test_more_logprobs_than_allowed_are_refused(engine_of):
    with engine_of("llama", **OPTIONS | {"max_logprobs": 5}) as driver:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"logprobs": 6}, "logprobs=6"),
            ({"prompt_logprobs": -1}, "prompt_logprobs=-1 asks"),
        ]
        for options, asked in cases:
            with pytest.raises(InputError, match=f"{asked}.* more than max_logprobs 5"):
                driver.engine.add("bad", [1, 2], SamplingParams(**options))
