"""Which sampler a batch needs, and what travels to it."""

from typing import Any

import numpy as np
import pytest

from jaxllm.config.logits_processor import LogitsProcessor
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.rank_items import rank_items
from jaxllm.engine.sampler_builder import SamplerBuilder
from jaxllm.engine.sampler_inputs import ANY_TOKEN, NO_SCORES, WHOLE_VOCABULARY, ProcessorShape, SamplerShape
from jaxllm.engine.sampler_rows import CountReset, best_size, last_for_word, token_mask
from jaxllm.scheduler.batch import RankBatch, Scheduled
from jaxllm.scheduler.request import Request

ROWS, VOCAB, B = 9, 70, 4
PROCESSORS = {
    "one": LogitsProcessor(function=abs, parameters={"a": 1.5, "ids": [1, 2]}),
    "two": LogitsProcessor(function=abs),
}


def make_request(output=(), eos=(), in_flight=0, **params: Any) -> Request:
    params.setdefault("temperature", 0.0)
    request = Request("r", [1, 2, 3], 20, eos_token_ids=frozenset(eos), params=SamplingParams(**params))
    request.output_ids += output
    request.num_in_flight = in_flight + 1  # the scheduler counts the token of the step itself
    return request


@pytest.fixture
def build():
    builder = SamplerBuilder(ROWS, VOCAB, PROCESSORS)
    owners: dict[int, Request] = {}

    def run(rows: dict[int, Request], samples=True, always=False):
        for row, request in rows.items():
            if owners.get(row) is not request:
                owners[row] = request
                builder.ranks[0].set_row(row, request)
        items = tuple(Scheduled(r, row, r.num_tokens - 2, 1, samples) for row, r in rows.items())
        return builder.build([rank_items(RankBatch(items))], B, always)

    return run


def views(sampling):
    return sampling.layout.host_views(sampling.packed[0])


def test_all_greedy_rows_need_no_sampler(build):
    assert build({0: make_request(), 3: make_request(top_k=4, top_p=0.5)}) is None
    assert build({0: make_request(temperature=1.0)}, samples=False) is None
    assert build({0: make_request()}, always=True).layout.shape == SamplerShape(B)


def test_the_sampler_is_the_least_that_its_rows_need(build):
    rare: dict[str, Any] = {"filters": True, "penalties": True, "num_edits": 64}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 1.0}, {}),
        ({"temperature": 1.0, "min_p": 0.1}, {"filters": True}),
        ({"temperature": 1.0, "top_k": 4}, {"filters": True}),
        ({"frequency_penalty": 0.1}, rare),
        ({"logit_bias": {4: 1.0}}, rare),
        ({"logit_bias": dict.fromkeys(range(65), 1.0)}, rare | {"num_edits": 512}),
        ({"min_tokens": 2}, rare),
        ({"allowed_token_ids": [4]}, rare | {"masked": True}),
        ({"logprobs": 0}, {"num_best": 0}),
        ({"logprobs": 5}, {"num_best": 8}),
        ({"logprobs": -1}, {"num_best": WHOLE_VOCABULARY}),
        ({"logprob_token_ids": [4, 6]}, {"num_best": 0, "num_named": 16}),
        ({"extra_args": {"two": {}}}, rare | {"processors": (ProcessorShape("two", 1),)}),
    ]
    for options, features in cases:
        assert build({5: make_request(**options), 2: make_request()}).layout.shape == SamplerShape(B, **features)


def test_numbers_travel_with_their_row_and_padding_is_harmless(build):
    mine = make_request(temperature=1.5, top_p=0.25, top_k=40, min_p=0.125, repetition_penalty=1.5, seed=2**40 + 3)
    inputs, _ = views(build({5: make_request(temperature=0.5, top_k=-1), 1: mine}))
    assert inputs.temperature.tolist() == [0.5, 1.5, 0, 0]
    assert inputs.top_p.tolist() == [1.0, 0.25, 1, 1]
    assert inputs.top_k.tolist() == [0, 40, 0, 0]
    assert inputs.min_p.tolist() == [0, 0.125, 0, 0]
    assert inputs.repetition.tolist() == [1, 1.5, 1, 1]
    assert inputs.seed[1].tolist() == [3, 1 << 8]
    assert inputs.row.tolist() == [5, 1, ROWS - 1, ROWS - 1]
    assert inputs.samples.tolist() == [1, 1, 0, 0]
    assert inputs.position.tolist() == [3, 3, 0, 0]


@pytest.mark.parametrize(
    ("seed", "low", "high"),
    [
        (7, 7, 0),
        (1 << 32, 0, 1),
        (2**64 - 1, 2**32 - 1, 2**32 - 1),
        (-1, 2**32 - 1, 2**32 - 1),
        (0xDEADBEEF_12345678, 0x12345678, 0xDEADBEEF),
    ],
)
def test_all_64_bits_of_a_seed_travel(build, seed, low, high):
    inputs, _ = views(build({0: make_request(temperature=1.5, seed=seed)}))
    assert inputs.seed[0].tolist() == [low, high]
    assert inputs.seed.dtype == np.uint32


def test_a_row_keeps_nothing_of_its_owner_before(build):
    full = {"allowed_token_ids": [4], "logit_bias": {5: 2.0}, "extra_args": {"one": {}}, "logprobs": 2, "min_p": 0.5}
    build({2: make_request(temperature=1.0, frequency_penalty=1.0, **full)})
    sampling = build({2: make_request(temperature=1.0)})
    assert sampling.layout.shape == SamplerShape(B)
    assert sampling.layout.shape.num_best == NO_SCORES


def test_counts_begin_anew_once_for_each_owner_of_a_row(build):
    first = make_request([8, 9], frequency_penalty=1.0)
    assert build({2: first}).count_resets == (CountReset(2, [1, 2, 3], [8, 9]),)
    assert build({2: first}).count_resets == ()
    other = make_request(presence_penalty=1.0)
    sampling = build({2: first, 4: other})
    assert sampling.count_resets == (CountReset(4, [1, 2, 3], []),)
    assert build({2: make_request(repetition_penalty=2.0)}).count_resets == (CountReset(2, [1, 2, 3], []),)


def test_edits_of_a_step_follow_from_the_rules_and_the_output_so_far(build):
    def edits(*rows: Request):
        inputs, _ = views(build(dict(enumerate(rows))))
        table = zip(inputs.edit_request, inputs.edit_token, inputs.edit_if_last, inputs.edit_value, strict=True)
        return sorted(tuple(map(float, edit)) for edit in table if edit[0] < B)

    banned = float("-inf")
    assert edits(make_request(logit_bias={4: 1.5, 6: -2.0})) == [(0, 4, ANY_TOKEN, 1.5), (0, 6, ANY_TOKEN, -2.0)]
    early, late = (make_request(output, eos=[60], min_tokens=2, max_tokens=9) for output in ([8], [8, 9]))
    assert edits(early, late) == [(0, 60, ANY_TOKEN, banned)]
    unread = make_request([8], eos=[60], min_tokens=2, in_flight=1)  # its second token is on the device
    assert edits(unread, early) == [(1, 60, ANY_TOKEN, banned)]
    words = ((5,), (8, 9), (7, 8, 9))
    assert edits(make_request([7, 8], bad_word_token_ids=words)) == [
        (0, 5, ANY_TOKEN, banned),
        (0, 9, ANY_TOKEN, banned),
        (0, 9, ANY_TOKEN, banned),
    ]
    assert edits(make_request([7], in_flight=1, bad_word_token_ids=words)) == [
        (0, 5, ANY_TOKEN, banned),
        (0, 9, 8, banned),
        (0, 9, 8, banned),
    ]


def test_when_a_bad_word_is_completed():
    assert last_for_word((4,), [], 0) == ANY_TOKEN
    assert last_for_word((4,), [9], 2) == ANY_TOKEN
    assert last_for_word((4, 5), [], 0) is None
    assert last_for_word((4, 5), [4], 1) == ANY_TOKEN
    assert last_for_word((4, 5), [6], 1) is None
    assert last_for_word((4, 5), [], 1) == 4
    assert last_for_word((3, 4, 5), [3], 2) == 4
    assert last_for_word((3, 4, 5), [9], 2) is None
    assert last_for_word((3, 4, 5), [], 1) is None


def test_a_mask_has_one_bit_per_token():
    mask = token_mask([0, 31, 32, 69], VOCAB)
    assert mask.tolist() == [1 | 1 << 31, 1, 1 << 5]
    assert mask.dtype == np.uint32


def test_the_parameters_of_processors_travel_with_defaults_filled_in(build):
    one = make_request(extra_args={"one": {"ids": [7, 8]}})
    both = make_request(extra_args={"two": {}, "one": {"a": 3}})
    sampling = build({3: one, 6: make_request(), 2: both})
    assert sampling.layout.shape.processors == (("one", 2), ("two", 1))
    _, processors = views(sampling)
    assert processors["one"].request.tolist() == [0, 2]
    assert processors["one"].parameters["ids"].tolist() == [[7, 8], [1, 2]]
    assert processors["one"].parameters["a"].tolist() == [1.5, 3.0]
    assert processors["two"].request.tolist() == [2]


def test_few_sizes_of_best_tokens_are_compiled():
    assert [best_size(k, 50_000) for k in (0, 1, 8, 9, 20, 128)] == [0, 8, 8, 32, 32, 128]
    assert best_size(129, 50_000) == best_size(-1, 50_000) == WHOLE_VOCABULARY
    assert best_size(20, 24) == 24
