"""What the sampler has to know of a data rank's rows, and its part of the sampler's inputs. Knows no other rank.

Keeps a host copy of every row's numbers, so that a step copies rows instead of walking over fields.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.rank_items import RankItems
from jaxllm.engine.sampler_inputs import (
    ANY_TOKEN,
    NO_SCORES,
    WHOLE_VOCABULARY,
    ProcessorInputs,
    SamplerInputs,
    mask_words,
)
from jaxllm.scheduler.batch import Scheduled
from jaxllm.scheduler.request import Request

# Sizes are few, since each makes a sampler that has to be compiled.
NUM_BEST = (0, 8, 32, 128)
NUM_NAMED = (0, 16, 128)
NUM_EDITS = tuple(64 << (3 * i) for i in range(8))

CHOICE, FILTERS, PENALTIES, EDITED, MASKED, SCORED, PROCESSED = (1 << bit for bit in range(7))
# Rare ones come together, and with the filters: every combination is a sampler of its own to be compiled. A mask is
# left out because it is large (V bits for each request and step).
RARE = PENALTIES | EDITED | MASKED | PROCESSED


class CountReset(NamedTuple):
    """A row whose counts of tokens begin anew: its prompt and what is known of its output."""

    row: int
    prompt_ids: list[int]
    output_ids: list[int]
    rank: int = 0


class _Edits(NamedTuple):
    """What has to be looked at for a row in each step: constant additions, and rules that depend on its output."""

    constant: tuple[tuple[int, float], ...]
    min_tokens: int
    bad_words: tuple[tuple[int, ...], ...]


class Wishes(NamedTuple):
    """What the items of a data rank that sample in a step want of the sampler, in all and one by one."""

    features: int
    num_best: int
    num_named: int
    sampling: list[tuple[int, Scheduled]]
    edits: list[tuple[int, int, int, float]]
    processed: dict[str, list[tuple[int, dict[str, Any]]]]


class SamplerRows:
    """The sampling parameters of rows 0..num_rows-1 of a data rank; the last one is the spare one of padding."""

    def __init__(self, data_rank: int, num_rows: int, vocab_size: int, processors: Mapping[str, LogitsProcessor]):
        self._data_rank = data_rank
        self._vocab_size = vocab_size
        self._processors = processors
        self._features = np.zeros(num_rows, np.int32)
        self._seed = np.zeros((num_rows, 2), np.uint32)
        self._top_k = np.zeros(num_rows, np.int32)
        self._num_best = np.zeros(num_rows, np.int32)
        self._numbers = {name: np.zeros(num_rows, np.float32) for name in _NUMBERS}
        self._named: dict[int, list[int]] = {}
        self._edits: dict[int, _Edits] = {}
        self._masks: dict[int, np.ndarray] = {}
        self._processed: dict[int, dict[str, dict[str, np.ndarray]]] = {}
        self._uncounted: set[int] = set()

    def set_row(self, row: int, request: Request) -> None:
        """Takes over the numbers of the request that has the row from now on."""
        params = request.params
        assert isinstance(params, SamplingParams)
        seed = (params.seed or 0) % 2**64
        self._seed[row] = (seed & 0xFFFFFFFF, seed >> 32)
        self._top_k[row] = max(params.top_k, 0)
        for name, field in _NUMBERS.items():
            self._numbers[name][row] = getattr(params, field)
        for kept in (self._named, self._edits, self._masks, self._processed):
            kept.pop(row, None)
        self._uncounted.discard(row)
        features = 0 if params.greedy else CHOICE
        if not params.greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0):
            features |= FILTERS
        if params.has_penalties:
            features |= PENALTIES
            self._uncounted.add(row)
        if params.logit_bias or params.min_tokens or params.bad_word_token_ids:
            features |= EDITED
            bias = tuple((params.logit_bias or {}).items())
            self._edits[row] = _Edits(bias, params.min_tokens, params.bad_word_token_ids)
        if params.allowed_token_ids:
            features |= MASKED
            self._masks[row] = token_mask(params.allowed_token_ids, self._vocab_size)
        if params.logprobs is not None or params.logprob_token_ids:
            features |= SCORED
            self._num_best[row] = params.logprobs or 0
            self._named[row] = params.logprob_token_ids or []
        asked = {name: given for name, given in (params.extra_args or {}).items() if name in self._processors}
        if asked:
            features |= PROCESSED
            self._processed[row] = {name: self._processors[name].values(given) for name, given in asked.items()}
        self._features[row] = features

    def features(self, own: RankItems) -> int:
        """Gives what the items that sample need together, 0 where the best token will do for all of them."""
        return int(np.bitwise_or.reduce(self._features[own.sampling_row]))

    def wishes(self, own: RankItems) -> Wishes:
        """Looks at what the items want, one by one where that is needed."""
        features = self.features(own)
        if not features & (RARE | SCORED):
            return Wishes(features, NO_SCORES, 0, [], [], {})
        sampling = [(b, item) for b, item in enumerate(own.items) if item.samples]
        scored = [item.row for _, item in sampling if item.row in self._named] if features & SCORED else []
        return Wishes(
            features,
            self._largest_num_best(scored),
            max((len(self._named[row]) for row in scored), default=0),
            sampling,
            self._row_edits(sampling) if features & EDITED else [],
            self._rows_by_processor(sampling) if features & PROCESSED else {},
        )

    def write(
        self,
        inputs: SamplerInputs[np.ndarray],
        processor_inputs: Mapping[str, ProcessorInputs[np.ndarray]],
        own: RankItems,
        wishes: Wishes,
    ) -> None:
        """Fills the rank's fields, which are zeros; what the items leave open becomes padding."""
        inputs.samples[: own.num_requests] = own.samples
        inputs.position[: own.num_requests] = own.end
        self._write_numbers(inputs, own.row)
        self._write_lists(inputs, wishes.sampling, wishes.edits)
        for name, each in processor_inputs.items():
            _write_processor(each, wishes.processed.get(name, []), len(inputs.row))

    def count_resets(self, wishes: Wishes) -> list[CountReset]:
        """Gives the rows whose counts begin anew, once for each owner."""
        resets = []
        for _, item in wishes.sampling:
            if item.row in self._uncounted:
                self._uncounted.remove(item.row)
                request = item.request
                resets.append(CountReset(item.row, request.prompt_ids, list(request.output_ids), self._data_rank))
        return resets

    def _write_numbers(self, inputs: SamplerInputs[np.ndarray], rows: np.ndarray) -> None:
        """Copies the rows' numbers into the fields that are there; padding divides by nothing and keeps all."""
        B = len(rows)
        inputs.row[:B] = rows
        inputs.row[B:] = len(self._features) - 1
        inputs.seed[:B] = self._seed[rows]
        for name, field in self._numbers.items():
            view = getattr(inputs, name)
            if view.size:
                view[:B] = field[rows]
        if inputs.top_k.size:
            inputs.top_k[:B] = self._top_k[rows]
            inputs.top_p[B:] = 1.0
        if inputs.repetition.size:
            inputs.repetition[B:] = 1.0

    def _write_lists(
        self,
        inputs: SamplerInputs[np.ndarray],
        sampling: list[tuple[int, Scheduled]],
        edits: list[tuple[int, int, int, float]],
    ) -> None:
        """Writes what rows have in different lengths: edits, masks, named tokens."""
        inputs.edit_request[:] = len(inputs.row)
        if edits:
            request, token, if_last, value = zip(*edits, strict=True)
            E = len(edits)
            inputs.edit_request[:E], inputs.edit_token[:E] = request, token
            inputs.edit_if_last[:E], inputs.edit_value[:E] = if_last, value
        if inputs.mask.size:
            inputs.mask[:] = 0xFFFFFFFF
            for b, item in sampling:
                if item.row in self._masks:
                    inputs.mask[b] = self._masks[item.row]
        if inputs.named.size:
            for b, item in sampling:
                named = self._named.get(item.row, ())
                inputs.named[b, : len(named)] = named

    def _largest_num_best(self, scored: list[int]) -> int:
        if not scored:
            return NO_SCORES
        wanted = self._num_best[scored]
        return WHOLE_VOCABULARY if wanted.min() < 0 else best_size(int(wanted.max()), self._vocab_size)

    def _row_edits(self, sampling: list[tuple[int, Scheduled]]) -> list[tuple[int, int, int, float]]:
        """Lists (request, token, condition on the last token, number to add)."""
        edits = []
        for b, item in sampling:
            rules = self._edits.get(item.row)
            if rules is None:
                continue
            request = item.request
            edits += [(b, token, ANY_TOKEN, value) for token, value in rules.constant]
            # The scheduler counts the token of this step already.
            num_before = request.num_tokens - 1 - request.num_prompt
            if num_before < rules.min_tokens:
                edits += [(b, token, ANY_TOKEN, -np.inf) for token in request.end_token_ids]
            for word in rules.bad_words:
                if_last = last_for_word(word, request.output_ids, num_before)
                if if_last is not None:
                    edits.append((b, word[-1], if_last, -np.inf))
        return edits

    def _rows_by_processor(self, sampling: list[tuple[int, Scheduled]]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
        by_name: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        for name in self._processors:  # in the order in which the user named them
            pairs = [(b, self._processed[i.row][name]) for b, i in sampling if name in self._processed.get(i.row, ())]
            if pairs:
                by_name[name] = pairs
        return by_name


_NUMBERS = {  # the sampler's name: SamplingParams' name
    "temperature": "temperature",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition": "repetition_penalty",
    "frequency": "frequency_penalty",
    "presence": "presence_penalty",
}


def _write_processor(
    own: ProcessorInputs[np.ndarray], pairs: list[tuple[int, dict[str, Any]]], num_requests: int
) -> None:
    own.request[:] = num_requests
    for r, (b, values) in enumerate(pairs):
        own.request[r] = b
        for parameter, value in values.items():
            own.parameters[parameter][r] = value


def last_for_word(word: tuple[int, ...], known: list[int], num_output: int) -> int | None:
    """Says when the last token of a bad word would complete it: the last token that the output must have by then.

    ANY_TOKEN where that is certain, None where it cannot be. `num_output` counts the tokens before the one to be
    chosen, of which the host knows all or all but the last.
    """
    before = word[:-1]
    if len(before) > num_output:
        return None
    if num_output == len(known):
        return ANY_TOKEN if not before or tuple(known[-len(before) :]) == before else None
    if not before:
        return ANY_TOKEN
    earlier = before[:-1]
    return before[-1] if not earlier or tuple(known[-len(earlier) :]) == earlier else None


def token_mask(allowed: list[int], vocab_size: int) -> np.ndarray:
    """One bit for each token of the vocabulary, set for those allowed."""
    bits = np.zeros(mask_words(vocab_size) * 32, bool)
    bits[allowed] = True
    return np.packbits(bits.reshape(-1, 32), axis=-1, bitorder="little").view("<u4")[:, 0].astype(np.uint32)


def best_size(num_best: int, vocab_size: int) -> int:
    """The compiled number of best tokens that holds this one."""
    return WHOLE_VOCABULARY if num_best < 0 or num_best > NUM_BEST[-1] else min(fit(NUM_BEST, num_best), vocab_size)


def larger_num_best(sizes: Sequence[int]) -> int:
    """The largest of several compiled numbers of best tokens."""
    return WHOLE_VOCABULARY if WHOLE_VOCABULARY in sizes else max(sizes)


def fit(sizes: tuple[int, ...], size: int) -> int:
    """The smallest of some ascending sizes that holds this one."""
    return sizes[bisect_left(sizes, size)]
