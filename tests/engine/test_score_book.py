"""Arrays of scores become what each request asked for."""

from typing import Any

import jax
import numpy as np

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.input_builder import PromptRun, PromptScoring
from jaxllm.engine.model_runner import StepScores
from jaxllm.engine.sampler import ScoreArrays
from jaxllm.engine.score_book import ScoreBook
from jaxllm.engine.scores import TokenScores
from jaxllm.scheduler.batch import RankBatch, Scheduled, ScheduledBatch
from jaxllm.scheduler.request import Request, RequestUpdate


def make_request(name: str, prompt=(1, 2, 3), **params: Any) -> Request:
    return Request(name, list(prompt), 8, params=SamplingParams(**params))


def batch_of(*items: Scheduled) -> ScheduledBatch:
    return ScheduledBatch((RankBatch(items),), 1)


def told_of(tokens, prompt=()) -> StepScores:
    """Stacks what one data rank told."""
    return jax.tree.map(lambda array: array[None], StepScores(tokens, prompt))


def arrays(N: int, best, tokens, named=0) -> ScoreArrays[np.ndarray]:
    return ScoreArrays(
        chosen=-np.arange(1.0, N + 1, dtype=np.float32),
        rank=np.arange(10, 10 + N, dtype=np.int32),
        best=np.asarray(best, np.float32),
        best_token=np.asarray(tokens, np.int32),
        named=-np.arange(100.0, 100 + N * named, dtype=np.float32).reshape(N, named),
    )


def test_each_request_gets_the_scores_that_it_asked_for():
    two, none, named = (
        make_request("two", logprobs=2),
        make_request("none"),
        make_request("named", logprob_token_ids=[7]),
    )
    middle = make_request("middle", logprobs=1)  # a chunk in the middle of its prompt
    batch = batch_of(*(Scheduled(r, i, 2, 1, r is not middle) for i, r in enumerate((two, none, named, middle))))
    told = arrays(8, [[-0.5, -0.75, -1.0]] * 8, [[4, 5, 6]] * 8, named=2)  # eight rows: half are padding
    updates = [RequestUpdate(name, (token,)) for name, token in (("two", 30), ("none", 31), ("named", 32))]
    ScoreBook().add(batch, [[30, 31, 32, 33]], None, told_of(told), updates)
    assert updates[0].scores.tokens == (TokenScores((30, 4, 5), (-1.0, -0.5, -0.75), (10, 1, 2)),)
    assert updates[1].scores is None
    assert updates[2].scores.tokens == (TokenScores((32, 7), (-3.0, -104.0), (12, 0)),)
    assert updates[2].scores.prompt is None


def test_what_is_ruled_out_is_not_among_the_best():
    request = make_request("r", logprobs=3)
    batch = batch_of(Scheduled(request, 0, 2, 1, True))
    update = RequestUpdate("r", (5,))
    told = arrays(1, [[-0.5, -np.inf, -np.inf]], [[5, 0, 0]])
    ScoreBook().add(batch, [[5]], None, told_of(told), [update])
    assert update.scores.tokens[0].token_ids == (5, 5)


def test_the_whole_vocabulary_is_sorted_for_those_who_want_it():
    some, everything = make_request("some", logprobs=2), make_request("everything", logprobs=-1)
    batch = batch_of(*(Scheduled(r, i, 2, 1, True) for i, r in enumerate((some, everything))))
    updates = [RequestUpdate("some", (0,)), RequestUpdate("everything", (1,))]
    told = arrays(2, [[-3.0, -1.0, -2.0, -1.0], [-1.0, -2.0, -3.0, -np.inf]], np.zeros(0))
    ScoreBook().add(batch, [[0, 1]], None, told_of(told), updates)
    assert updates[0].scores.tokens[0].token_ids == (0, 1, 3)
    assert updates[1].scores.tokens[0].token_ids == (1, 0, 1, 2)
    assert updates[1].scores.tokens[0].ranks == (11, 1, 2, 3)


def test_a_prompt_is_told_once_whole_and_with_the_first_token():
    request, other = make_request("r", range(50, 55), prompt_logprobs=1), make_request("other", prompt_logprobs=0)
    book = ScoreBook()
    book.expect("r", 5)
    book.expect("other", 3)

    def step(runs, N, updates=()):
        tokens = [
            run.request.prompt_ids[at] for run in runs for at in range(run.position, run.position + run.num_tokens)
        ]
        scoring = PromptScoring(np.asarray([[range(len(tokens)), tokens]], np.int32), 1, (tuple(runs),))
        told = arrays(N, [[-0.5]] * N, [[9]] * N)
        book.add(batch_of(), [[]], scoring, told_of(None, (told,)), updates)

    step([PromptRun(other, 1, 1), PromptRun(request, 1, 2)], 16)
    step([PromptRun(request, 3, 2)], 16, updates := [RequestUpdate("r", (1,))])
    page = updates[0].scores.prompt
    assert page == (
        None,
        TokenScores((51, 9), (-2.0, -0.5), (11, 1)),
        TokenScores((52, 9), (-3.0, -0.5), (12, 1)),
        TokenScores((53, 9), (-1.0, -0.5), (10, 1)),
        TokenScores((54, 9), (-2.0, -0.5), (11, 1)),
    )
    assert updates[0].scores.tokens == ()
    step([PromptRun(request, 1, 4)], 16, again := [RequestUpdate("r", (2,))])  # computed again after a preemption
    assert again[0].scores is None
    book.forget([RequestUpdate("other", finish_reason="abort")])
    book.add(batch_of(), [[]], None, None, last := [RequestUpdate("other", (3,))])
    assert last[0].scores is None
