from typing import Any

import numpy as np
import pytest

from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.buckets import make_buckets
from jaxllm.engine.input_builder import InputBuilder
from jaxllm.engine.rank_rows import known_tokens
from jaxllm.engine.step_inputs import UNKNOWN_TOKEN, host_views
from jaxllm.scheduler.batch import RankBatch, Scheduled, ScheduledBatch
from jaxllm.scheduler.request import Request

ROWS, MAX_BLOCKS, GROUPS, VOCAB = 8, 12, 2, 300
BUCKETS = make_buckets(ROWS, 64, MAX_BLOCKS, coarse=False)


def make_request(prompt, output=(), tables=((1, 2), (3, 4)), **params: Any):
    params.setdefault("temperature", 0.0)
    request = Request("r", list(prompt), 20, params=SamplingParams(**params))
    request.output_ids += output
    request.block_tables = [list(table) for table in tables]
    return request


def scheduled(request, row, start, count, samples=True):
    return Scheduled(request, row, start, count, samples)


@pytest.fixture
def builder():
    return InputBuilder(BUCKETS, ROWS, MAX_BLOCKS, GROUPS, vocab_size=VOCAB, seed=5)


def batch_of(*items, again=(), grown=()):
    """A batch as the scheduler makes it: who has no row yet, or runs `again`, is admitted."""
    admitted = [item.request for item in items if item.request.row is None or item.request in again]
    for item in items:
        item.request.row = item.row
    return ScheduledBatch((RankBatch(items, admitted=tuple(admitted), grown=tuple(grown)),), 1)


def build(builder, *items, **news):
    """The shape and the fields of a step, as arrays."""
    shape, packed, *_ = builder.build(batch_of(*items, **news))
    assert packed.dtype == np.int32
    return shape, host_views(packed[0], shape, GROUPS)


def test_known_tokens_come_from_prompt_and_output_and_the_device():
    request = make_request([10, 11, 12], [13, 14])
    assert known_tokens(request, 0, 2) == [10, 11]
    assert known_tokens(request, 1, 3) == [11, 12, 13]
    assert known_tokens(request, 3, 2) == [13, 14]
    assert known_tokens(request, 4, 2) == [14, UNKNOWN_TOKEN]
    assert known_tokens(request, 5, 1) == [UNKNOWN_TOKEN]
    assert known_tokens(request, 0, 6) == [10, 11, 12, 13, 14, UNKNOWN_TOKEN]
    assert known_tokens(make_request([10]), 1, 1) == [UNKNOWN_TOKEN]


def test_a_ragged_batch_is_laid_out_flat_and_padded(builder):
    chunk = make_request(range(100, 110), tables=((5, 6), (7, 8)))
    middle = make_request(range(200, 230), tables=((9,), (10,)))
    one = make_request([30], [31])
    shape, inputs = build(
        builder, scheduled(chunk, 4, 3, 5, False), scheduled(middle, 0, 0, 2, False), scheduled(one, 7, 1, 1)
    )
    assert (shape.program, shape.num_tokens, shape.num_requests) == ("mixed", 32, 8)
    assert inputs.token[:8].tolist() == [103, 104, 105, 106, 107, 200, 201, 31]
    assert inputs.position[:8].tolist() == [3, 4, 5, 6, 7, 0, 1, 1]
    assert inputs.request[:8].tolist() == [0] * 5 + [1] * 2 + [2]
    assert inputs.query_start.tolist() == [0, 5, 7, 8, *[8] * 5]
    assert inputs.context_len.tolist() == [8, 2, 2, *[0] * 5]
    assert inputs.samples.tolist() == [0, 0, 1, *[0] * 5]
    assert inputs.row.tolist() == [4, 0, 7, *[ROWS] * 5]  # padding goes to the spare row
    assert (inputs.position[8:] == -1).all()
    assert (inputs.request[8:] < 8).all()
    assert inputs.block_table[:, 0, :3].tolist() == [[5, 6, 0], [7, 8, 0]]
    assert inputs.block_table[:, 1, :3].tolist() == [[9, 0, 0], [10, 0, 0]]
    assert not inputs.block_table[:, 3:].any()


def test_a_decode_batch_has_one_token_per_row_padding_included(builder):
    items = [scheduled(make_request([20 + i], [40 + i]), row, 1, 1) for i, row in enumerate((6, 2, 3))]
    shape, inputs = build(builder, *items)
    assert (shape.program, shape.num_tokens, shape.num_requests) == ("decode", 8, 8)
    assert inputs.token[:3].tolist() == [40, 41, 42]
    assert inputs.query_start.tolist() == [*range(9)]
    assert inputs.request.tolist() == [*range(8)]
    assert inputs.position.tolist() == [1, 1, 1] + 5 * [-1]
    assert inputs.context_len.tolist() == [2, 2, 2] + 5 * [0]
    assert inputs.row.tolist() == [6, 2, 3] + 5 * [ROWS]
    assert inputs.samples.tolist() == [1, 1, 1] + 5 * [0]


def test_a_token_still_in_flight_is_left_to_the_device(builder):
    request = make_request([1, 2, 3])
    request.num_in_flight = 1
    _, inputs = build(builder, scheduled(request, 0, 3, 1))
    assert inputs.token[0] == UNKNOWN_TOKEN
    assert inputs.position[0] == 3
    assert inputs.context_len[0] == 4


def test_tables_grow_by_what_is_new(builder):
    request = make_request(range(30), tables=((1,), (2,)))
    build(builder, scheduled(request, 0, 0, 4, False))
    request.block_tables[0] += [5, 7]
    request.block_tables[1] += [6, 8]
    _, inputs = build(builder, scheduled(request, 0, 4, 4, False), grown=[request])
    assert inputs.block_table[:, 0, :4].tolist() == [[1, 5, 7, 0], [2, 6, 8, 0]]
    _, inputs = build(builder, scheduled(request, 0, 8, 1, False))
    assert inputs.block_table[:, 0, :4].tolist() == [[1, 5, 7, 0], [2, 6, 8, 0]]


def test_a_row_keeps_nothing_of_its_owner_before(builder):
    first = make_request(range(9), tables=((1, 2, 3), (4, 5, 6)), temperature=0.7, seed=99, top_k=3)
    build(builder, scheduled(first, 2, 0, 9))
    second = make_request(range(3), tables=((7,), (8,)))
    shape, inputs = build(builder, scheduled(second, 2, 0, 3))
    assert shape.variant == "greedy"
    assert inputs.block_table[:, 0, :4].tolist() == [[7, 0, 0, 0], [8, 0, 0, 0]]


def test_a_request_that_was_preempted_and_comes_back_to_its_row_gets_its_new_blocks(builder):
    request = make_request(range(9), tables=((1, 2), (3, 4)))
    build(builder, scheduled(request, 1, 0, 9))
    request.block_tables = [[5], [6]]
    _, inputs = build(builder, scheduled(request, 1, 0, 4, False), again=[request])
    assert inputs.block_table[:, 0, :3].tolist() == [[5, 0, 0], [6, 0, 0]]


def test_the_device_is_trusted_with_the_token_it_chose_last_for_a_row_and_with_no_other(builder):
    request, other = make_request([1, 2, 3]), make_request(range(50, 60))
    build(builder, scheduled(request, 0, 0, 3))
    request.output_ids.append(77)  # the host knows it by now, and need not look
    _, inputs = build(builder, scheduled(request, 0, 3, 1), scheduled(other, 1, 0, 4, False))
    assert inputs.token[:5].tolist() == [UNKNOWN_TOKEN, 50, 51, 52, 53]
    request.output_ids.append(78)
    _, inputs = build(builder, scheduled(request, 0, 4, 1), scheduled(other, 1, 4, 1, False))
    assert inputs.token[:2].tolist() == [UNKNOWN_TOKEN, 54]  # the first of these samples, the second does not
    # It comes back to its row, and is computed again: up to its last token, then that one alone.
    _, inputs = build(builder, scheduled(request, 0, 0, 4, False), again=[request])
    assert inputs.token[:4].tolist() == [1, 2, 3, 77]
    _, inputs = build(builder, scheduled(request, 0, 4, 1))
    assert inputs.token[0] == 78


def test_each_step_gets_an_array_of_its_own(builder):
    request = make_request(range(9))
    _, first = build(builder, scheduled(request, 0, 0, 4, False))
    before = first.token.copy()
    _, second = build(builder, scheduled(request, 0, 4, 4, False))
    np.testing.assert_array_equal(first.token, before)
    assert not np.shares_memory(first.token, second.token)


def test_the_step_chooses_only_where_all_are_greedy(builder):
    greedy, sampled, scored = make_request([1, 2]), make_request([1, 2], temperature=1.0), make_request([1], logprobs=0)
    greedy_top_p = make_request([1, 2], top_p=0.5)

    def variant(*requests, samples=True):
        items = [scheduled(request, row, 0, 2, samples) for row, request in enumerate(requests)]
        step = builder.build(batch_of(*items, again=requests))
        assert (step.sampling is None) == (step.shape.variant == "greedy")
        return step.shape.variant

    assert variant(greedy, greedy_top_p) == "greedy"
    assert variant(greedy, sampled) == "logits"
    assert variant(scored, greedy) == "logits"
    assert variant(sampled, samples=False) == "greedy"  # a chunk in the middle of a prompt samples nothing


def test_scored_prompts_name_each_token_and_the_one_before_it(builder):
    plain = make_request(range(100, 110))
    first = make_request(range(200, 207), prompt_logprobs=1)
    late = make_request(range(50, 60), prompt_logprobs=3, prompt_logprob_start=4)
    ended = make_request([7, 8], [9], prompt_logprobs=0)
    items = (
        scheduled(plain, 0, 0, 4, False),
        scheduled(first, 1, 2, 5),
        scheduled(late, 2, 1, 6, False),
        scheduled(ended, 3, 2, 1),
    )
    step = builder.build(batch_of(*items))
    assert step.shape.variant == "hidden"
    assert step.sampling is not None  # two of them sample, and a step that gives hidden states chooses nothing
    prompt = step.prompt
    assert prompt.index_and_token[0].tolist() == [[4, 5, 6, 7, 11, 12, 13, 14], [203, 204, 205, 206, 54, 55, 56, 57]]
    assert prompt.runs == (((first, 3, 4), (late, 4, 4)),)
    assert prompt.num_best == 8


def test_all_data_ranks_run_the_shape_of_the_largest_and_one_without_requests_is_padding():
    builder = InputBuilder(BUCKETS, ROWS, MAX_BLOCKS, GROUPS, vocab_size=VOCAB, num_ranks=3)
    chunk = make_request(range(100, 110), tables=((5, 6), (7, 8)))
    ones = [make_request([20 + i], [40 + i], temperature=1.0, seed=i) for i in range(5)]
    parts = [
        batch_of(scheduled(chunk, 4, 3, 5, False)).ranks[0],  # as many tokens as the next has requests: still mixed
        batch_of(*(scheduled(one, row, 1, 1) for row, one in enumerate(ones))).ranks[0],
        RankBatch(),
    ]
    step = builder.build(ScheduledBatch(tuple(parts), 1))
    assert (step.shape.program, step.shape.num_tokens, step.shape.num_requests) == ("mixed", 32, 8)
    assert step.num_tokens == (5, 5, 0)
    assert step.num_context == 10
    first, second, idle = (host_views(array, step.shape, GROUPS) for array in step.packed)
    assert first.token[:5].tolist() == [103, 104, 105, 106, 107]
    assert first.query_start.tolist() == [0, *[5] * 8]
    assert second.query_start.tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 5]
    assert (idle.position == -1).all()
    assert (idle.request == 0).all()
    assert (idle.row == ROWS).all()
    assert not idle.query_start.any()
    assert not idle.context_len.any()
    assert not idle.samples.any()
    assert step.sampling is not None  # for all, since one rank's requests are not greedy
    sampling = [step.sampling.layout.host_views(array)[0] for array in step.sampling.packed]
    assert [inputs.samples.sum() for inputs in sampling] == [0, 5, 0]
    assert sampling[1].seed[:5, 0].tolist() == [0, 1, 2, 3, 4]
    parts = [RankBatch(), batch_of(*(scheduled(one, row, 2, 1) for row, one in enumerate(ones))).ranks[0], RankBatch()]
    step = builder.build(ScheduledBatch(tuple(parts), 2))
    assert (step.shape.program, step.shape.num_tokens) == ("decode", 8)
    assert (host_views(step.packed[0], step.shape, GROUPS).position == -1).all()


def test_prompts_are_scored_and_counts_begin_anew_on_the_rank_that_has_the_request():
    builder = InputBuilder(BUCKETS, ROWS, MAX_BLOCKS, GROUPS, vocab_size=VOCAB, num_ranks=2)
    scored = make_request(range(50, 55), prompt_logprobs=3)
    counted = make_request([7, 8], frequency_penalty=0.5)
    parts = [batch_of(scheduled(counted, 2, 0, 2)).ranks[0], batch_of(scheduled(scored, 2, 0, 5, False)).ranks[0]]
    step = builder.build(ScheduledBatch(tuple(parts), 1))
    assert step.prompt is not None
    assert step.sampling is not None
    assert step.prompt.runs == ((), ((scored, 1, 4),))
    assert step.prompt.index_and_token.tolist() == [[[0] * 4, [0] * 4], [[0, 1, 2, 3], [51, 52, 53, 54]]]
    assert [(reset.rank, reset.row) for reset in step.sampling.count_resets] == [(0, 2)]


def test_drawn_seeds_follow_from_the_engines_seed():
    def draws(seed):
        builder = InputBuilder(BUCKETS, ROWS, MAX_BLOCKS, GROUPS, vocab_size=VOCAB, seed=seed)
        return [builder.draw_seed() for _ in range(50)]

    assert draws(5) == draws(5) != draws(6)
    assert len(set(draws(5))) == 50
    assert all(0 <= seed < 2**64 for seed in draws(5))
    assert max(draws(5)) >= 2**63
