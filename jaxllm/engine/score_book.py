"""Arrays of scores -> TokenScores in the updates of requests. Knows batches and numpy arrays; no device."""

from collections.abc import Iterable, Sequence

import numpy as np

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.input_builder import PromptScoring
from jaxllm.engine.model_runner import StepScores
from jaxllm.engine.sampler import ScoreArrays
from jaxllm.engine.scores import RequestScores, TokenScores
from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.request import RequestUpdate


class ScoreBook:
    """Gathers the scores of prompts over the steps that compute them, and adds all scores to the updates."""

    def __init__(self) -> None:
        self._prompts: dict[str, list[TokenScores | None]] = {}

    def add(
        self,
        batch: ScheduledBatch,
        token_ids: Sequence[int],
        prompt: PromptScoring | None,
        scores: StepScores | None,
        updates: Sequence[RequestUpdate],
    ) -> None:
        """Adds what a step told to the updates that it brought."""
        if prompt is not None and scores is not None:
            self._add_prompts(prompt, scores.prompt)
        told = {} if scores is None or scores.tokens is None else _by_request(batch, token_ids, scores.tokens)
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

    def _add_prompts(self, prompt: PromptScoring, pieces: Sequence[ScoreArrays[np.ndarray]]) -> None:
        places = ((arrays, n) for arrays in pieces for n in range(len(arrays.chosen)))
        for request, position, count in prompt.runs:
            page = self._prompts.get(request.request_id)
            assert isinstance(request.params, SamplingParams)
            num_best = request.params.prompt_logprobs or 0
            for at in range(position, position + count):
                arrays, n = next(places)
                if page is not None:  # otherwise it has ended meanwhile, or its prompt was told before a preemption
                    page[at] = token_scores(arrays, n, request.prompt_ids[at], num_best)


def _by_request(
    batch: ScheduledBatch, token_ids: Sequence[int], arrays: ScoreArrays[np.ndarray]
) -> dict[str, TokenScores]:
    told = {}
    for b, item in enumerate(batch.items):
        params = item.request.params
        assert isinstance(params, SamplingParams)
        if item.samples and (params.logprobs is not None or params.logprob_token_ids):
            named = params.logprob_token_ids or ()
            told[item.request.request_id] = token_scores(arrays, b, token_ids[b], params.logprobs or 0, named)
    return told


def token_scores(
    arrays: ScoreArrays[np.ndarray], place: int, token: int, num_best: int, named_ids: Sequence[int] = ()
) -> TokenScores:
    """Gives one position's scores. What processing has ruled out (-inf) is not among the best."""
    best = arrays.best[place]
    if arrays.best_token.ndim == 1:  # the whole vocabulary, in its own order
        order = np.argsort(-best, kind="stable")[: None if num_best < 0 else num_best]
    else:
        order = np.arange(num_best)
    order = order[np.isfinite(best[order])]
    best_ids = order if arrays.best_token.ndim == 1 else arrays.best_token[place][order]
    named = arrays.named[place, : len(named_ids)]
    return TokenScores(
        (token, *best_ids.tolist(), *named_ids),
        (float(arrays.chosen[place]), *best[order].tolist(), *named.tolist()),
        (int(arrays.rank[place]), *range(1, len(order) + 1), *[0] * len(named_ids)),
    )
