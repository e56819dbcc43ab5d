"""Arrays of scores -> TokenScores in the updates of requests. Knows batches and numpy arrays; no device."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.input_builder import PromptRun, PromptScoring
from jaxllm.engine.model_runner import StepScores
from jaxllm.engine.sampler import ScoreArrays
from jaxllm.engine.scores import RequestScores, TokenScores
from jaxllm.scheduler.batch import RankBatch, ScheduledBatch
from jaxllm.scheduler.request import RequestUpdate


class ScoreBook:
    """Gathers the scores of prompts over the steps that compute them, and adds all scores to the updates."""

    def __init__(self) -> None:
        self._prompts: dict[str, list[TokenScores | None]] = {}

    def add(
        self,
        batch: ScheduledBatch,
        token_ids: Sequence[Sequence[int]],
        prompt: PromptScoring | None,
        scores: StepScores | None,
        updates: Sequence[RequestUpdate],
    ) -> None:
        """Adds what a step told to the updates that it brought; token ids and scores come by data rank."""
        told: dict[str, TokenScores] = {}
        for rank, part in enumerate(batch.ranks if scores is not None else ()):
            assert scores is not None
            own = scores.of_rank(rank)
            if prompt is not None:
                self._add_prompts(prompt.runs[rank], own.prompt)
            if own.tokens is not None:
                told |= _by_request(part, token_ids[rank], own.tokens)
        if not told and not self._prompts:
            return
        for update in updates:
            found = told.get(update.request_id)
            told_prompt = self._told_prompt(update) if self._prompts else None
            if found is not None or told_prompt is not None:
                update.scores = RequestScores(() if found is None else (found,), told_prompt)  # pyright: ignore[reportAttributeAccessIssue]

    def forget(self, ended: Iterable[RequestUpdate]) -> None:
        """Drops what is gathered for requests that end without a token."""
        for update in ended:
            self._prompts.pop(update.request_id, None)

    def expect(self, request_id: str, num_prompt: int) -> None:
        """Opens a page for a request whose prompt is to be scored."""
        self._prompts[request_id] = [None] * num_prompt

    def _told_prompt(self, update: RequestUpdate) -> tuple[TokenScores | None, ...] | None:
        if not (update.token_ids or update.finish_reason):
            return None
        told = self._prompts.pop(update.request_id, None)
        return None if told is None else tuple(told)

    def _add_prompts(self, runs: Sequence[PromptRun], pieces: Sequence[ScoreArrays[np.ndarray]]) -> None:
        told = (each for arrays in pieces for each in _rows(arrays))
        for request, position, num_tokens in runs:
            page = self._prompts.get(request.request_id)
            assert isinstance(request.params, SamplingParams)
            num_best = request.params.prompt_logprobs or 0
            for at in range(position, position + num_tokens):
                row = next(told)
                if page is not None:  # otherwise it has ended meanwhile, or its prompt was told before a preemption
                    page[at] = token_scores(row, request.prompt_ids[at], num_best)


class _Row(NamedTuple):
    """One position's scores as Python numbers; `best` in order, or `whole`, the vocabulary's in its own order."""

    chosen: float
    rank: int
    best: list[float]
    best_ids: list[int]
    whole: np.ndarray | None
    named: list[float]


def _rows(arrays: ScoreArrays[np.ndarray]) -> Iterator[_Row]:
    """Converts whole arrays at once: a number by number is ten times slower."""
    chosen, rank, named = arrays.chosen.tolist(), arrays.rank.tolist(), arrays.named.tolist()
    if arrays.best_token.ndim == 1:
        return (_Row(c, r, [], [], whole, n) for c, r, whole, n in zip(chosen, rank, arrays.best, named, strict=True))
    best = zip(arrays.best.tolist(), arrays.best_token.tolist(), strict=True)
    return (_Row(c, r, b, ids, None, n) for c, r, (b, ids), n in zip(chosen, rank, best, named, strict=True))


def _by_request(part: RankBatch, token_ids: Sequence[int], arrays: ScoreArrays[np.ndarray]) -> dict[str, TokenScores]:
    told = {}
    for item, token, row in zip(part.items, token_ids, _rows(arrays), strict=False):  # the rest is padding
        params = item.request.params
        assert isinstance(params, SamplingParams)
        if item.samples and (params.logprobs is not None or params.logprob_token_ids):
            named = params.logprob_token_ids or ()
            told[item.request.request_id] = token_scores(row, token, params.logprobs or 0, named)
    return told


def token_scores(row: _Row, token: int, num_best: int, named_ids: Sequence[int] = ()) -> TokenScores:
    """Gives one position's scores. What processing has ruled out (-inf) is not among the best."""
    best, best_ids = row.best[:num_best], row.best_ids[:num_best]
    if row.whole is not None:
        order = np.argsort(-row.whole, kind="stable")[: None if num_best < 0 else num_best]
        best, best_ids = row.whole[order].tolist(), order.tolist()
    while best and best[-1] == -math.inf:
        best.pop()
        best_ids.pop()
    return TokenScores(
        (token, *best_ids, *named_ids),
        (row.chosen, *best, *row.named[: len(named_ids)]),
        (row.rank, *range(1, len(best) + 1), *[0] * len(named_ids)),
    )
