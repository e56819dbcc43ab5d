import itertools
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import BeamSearchParams
from jaxllm.api.beam_search import search_beams
from jaxllm.api.logprobs import Logprob
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.engine.limits import EngineLimits

EOS, VOCABULARY = 0, 4
LIMITS = EngineLimits(vocab_size=VOCABULARY, max_model_len=100, eos_token_ids=(EOS,))


def next_logprobs(tokens: list[int]) -> list[float]:
    """A model: the log-probabilities of the next token, drawn anew for each beginning."""
    draw = random.Random(str(tokens))
    weights = [draw.random() ** 3 + 0.01 for _ in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


def generate(prompts: list[TokenizedPrompt], params: Any) -> list[Any]:
    outputs = []
    for prompt in prompts:
        scores = next_logprobs(prompt.token_ids)
        best = sorted(range(VOCABULARY), key=lambda token: -scores[token])[: params.logprobs]
        position = {token: Logprob(scores[token], rank) for rank, token in enumerate(best, 1)}
        outputs.append(SimpleNamespace(outputs=[SimpleNamespace(logprobs=[position])]))
    return outputs


def everything(prompt: list[int], max_tokens: int) -> dict[tuple[int, ...], float]:
    """Every continuation up to its EOS or max_tokens, with its log-probability."""
    found = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=max_tokens):
        kept, total = [], 0.0
        for token in tokens:
            total += next_logprobs([*prompt, *kept])[token]
            kept.append(token)
            if token == EOS:
                break
        found[tuple(kept)] = total
    return found


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_search_as_wide_as_all_continuations_finds_the_best_of_them(penalty: float):
    prompt, max_tokens = [1, 2], 3
    params = BeamSearchParams(beam_width=64, max_tokens=max_tokens, length_penalty=penalty)
    ended = []
    (search,) = search_beams([TokenizedPrompt(prompt)], params, LIMITS, generate, lambda: ended.append(1))
    best = search.result(None).sequences

    def score(item: tuple[tuple[int, ...], float]) -> float:
        length = len(prompt) + len(item[0]) - (item[0][-1] == EOS)
        return item[1] / length**penalty

    expected = sorted(everything(prompt, max_tokens).items(), key=score, reverse=True)
    assert len(best) == len(expected)
    assert [beam.cum_logprob for beam in best] == pytest.approx([total for _, total in expected])
    for beam, (tokens, _) in zip(best, expected, strict=True):
        assert beam.tokens[2:] == [token for token in tokens if token != EOS]
        assert beam.finish_reason == ("stop" if tokens[-1] == EOS else "length")
        assert beam.stop_reason == (EOS if tokens[-1] == EOS else None)
        assert len(beam.logprobs) == len(tokens)
    assert ended == [1]


def test_a_narrow_search_keeps_the_best_forks_of_each_step():
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    (search,) = search_beams([TokenizedPrompt([3])], params, LIMITS, generate, lambda: None)
    beams: list[tuple[list[int], float]] = [([3], 0.0)]
    for _ in range(4):
        forks = [
            ([*tokens, token], total + logprob)
            for tokens, total in beams
            for token, logprob in enumerate(next_logprobs(tokens))
        ]
        beams = sorted(forks, key=lambda fork: fork[1], reverse=True)[:2]
    found = search.result(None).sequences
    assert [beam.tokens for beam in found] == [tokens for tokens, _ in beams]
    assert [beam.cum_logprob for beam in found] == pytest.approx([total for _, total in beams])
    assert [beam.finish_reason for beam in found] == ["length", "length"]


def test_eos_is_kept_where_it_is_asked_for_and_searches_run_side_by_side():
    params = BeamSearchParams(beam_width=3, max_tokens=3, include_stop_str_in_output=True)
    batches = []

    def noted(prompts: list[TokenizedPrompt], one: Any) -> list[Any]:
        batches.append(len(prompts))
        assert (one.max_tokens, one.logprobs) == (1, 6)
        return generate(prompts, one)

    prompts = [TokenizedPrompt([token]) for token in (1, 2)]
    searches = search_beams(prompts, params, LIMITS, noted, lambda: None)
    assert len(batches) == 3
    assert batches[0] == 2
    for search in searches:
        for beam in search.result(None).sequences:
            assert (beam.tokens[-1] == EOS) == (beam.finish_reason == "stop")


def test_a_search_ends_where_the_models_length_does():
    limits = EngineLimits(vocab_size=VOCABULARY, max_model_len=5)
    params = BeamSearchParams(beam_width=2, max_tokens=50)
    (search,) = search_beams([TokenizedPrompt([1, 2])], params, limits, generate, lambda: None)
    assert [len(beam.tokens) for beam in search.result(None).sequences] == [5, 5]
