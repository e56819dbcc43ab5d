"""What steps take, learned from those that ran, and how large one may be."""

import logging
from collections.abc import Callable

import pytest

from jaxllm.scheduler.pace import Pace, StepTime
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler

SIZES = (8, 16, 32, 64)
OF_CONTEXT = 2e-5

type MakeScheduler = Callable[..., Scheduler]


def seconds(num_tokens: int, num_context: int) -> float:
    """A device: weights, or products, and the context."""
    return max(0.01, 0.001 * num_tokens) + OF_CONTEXT * num_context


def make_pace(target: float) -> Pace:
    return Pace(target, lambda _: SIZES, lambda num_requests: num_requests)


def test_the_first_step_of_a_size_is_not_counted_since_it_may_have_been_compiled():
    time = StepTime()
    time.observe(8, False, 0, 5.0)
    assert time.predict(8, False, 0) is None
    time.observe(8, False, 0, 0.01)
    assert time.predict(8, False, 0) == 0.01
    assert time.predict(8, True, 0) is None


def test_it_learns_what_context_costs_from_any_size_and_applies_it_to_all():
    time = StepTime()
    for context in (100, 100):
        time.observe(64, False, context, seconds(64, context))
    for i in range(40):
        time.observe(8, True, 100 + 10 * i, seconds(8, 100 + 10 * i))
    assert time.seconds_per_context_token == pytest.approx(OF_CONTEXT, rel=0.01)
    assert time.predict(64, False, 500) == pytest.approx(seconds(64, 500), rel=0.01)


def test_a_hiccup_counts_as_twice_the_time_at_most():
    time = StepTime()
    for _ in range(5):
        time.observe(8, True, 0, 0.01)
    time.observe(8, True, 0, 60.0)
    predicted = time.predict(8, True, 0)
    assert predicted is not None
    assert predicted < 0.0121


def _play(pace: Pace, steps: int, num_running: int = 4, num_context: int = 50) -> list[int]:
    sizes = []
    for _ in range(steps):
        size = pace.most_tokens(num_running, num_running + 1, num_context)
        sizes.append(size)
        is_decode = not size
        num_tokens = size or num_running
        pace.time.observe(num_tokens, is_decode, num_context + num_tokens, seconds(num_tokens, num_context))
    return sizes


def test_sizes_are_tried_one_after_the_other_up_to_the_largest_in_time():
    assert _play(make_pace(0.040), 12) == [8, 8, 16, 16, 32, 32, 64, 64, 32, 32, 32, 32]
    assert _play(make_pace(1.0), 10)[-1] == 64


def test_a_size_that_took_too_long_is_tried_again_after_a_while():
    sizes = _play(make_pace(0.040), 600)
    assert sizes[8:].count(64) == 2
    assert set(sizes[8:]) == {32, 64}


def test_a_step_has_more_than_the_single_tokens_of_those_who_run():
    pace = make_pace(1.0)
    assert pace.most_tokens(16, 17, 0) == 32
    assert pace.most_tokens(7, 8, 0) == 8


def test_a_target_below_the_time_of_decoding_alone_is_told_once_and_leaves_decoding_alone(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.WARNING):
        sizes = _play(make_pace(0.012), 200, num_running=20)
    assert sizes[:2] == [32, 32]
    assert not any(sizes[2:])
    assert [record.getMessage() for record in caplog.records] == [
        "target_tpot_ms 12 cannot be met: a step of 20 decoding requests takes 21 ms without any prompt; prompts wait "
        "until fewer decode. Raise the target or lower max_num_seqs"
    ]


def _serve(make_scheduler: MakeScheduler, target: float | None) -> tuple[float, float]:
    """Gives the mean time to the first token and the 90th percentile of the time between two, on a simulated clock."""
    pace = None if target is None else make_pace(target)
    scheduler = make_scheduler(seqs=16, budget=64, max_model_len=128, num_blocks=2000, step_sizes=SIZES, pace=pace)
    for i in range(60):
        scheduler.add(Request(str(i), [1000 * i + j for j in range(10 + i % 50)], 5 + i % 23))
    now, first, gaps, last = 0.0, [], [], {}
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert batch is not None
        is_decode = batch.num_tokens == len(batch.items)
        context = sum(item.start + item.count for item in batch.items)
        size = batch.num_tokens if is_decode else next(size for size in SIZES if size >= batch.num_tokens)
        took = seconds(size, context)
        now += took
        if pace is not None:
            pace.time.observe(size, is_decode, context, took)
        for update in scheduler.update(batch, [7] * len(batch.items)):
            before = last.get(update.request_id)
            first.append(now) if before is None else gaps.append(now - before)
            last[update.request_id] = now
    return sum(first) / len(first), sorted(gaps)[int(0.9 * len(gaps))]


def test_the_time_between_two_tokens_stays_under_the_target_at_the_price_of_the_first(make_scheduler: MakeScheduler):
    free_first, free_gap = _serve(make_scheduler, None)
    paced_first, paced_gap = _serve(make_scheduler, 0.070)
    assert free_gap > 0.080
    assert paced_gap <= 0.070
    assert paced_first > free_first


def test_all_end_even_under_a_target_that_cannot_be_met(make_scheduler: MakeScheduler):
    _, gap = _serve(make_scheduler, 0.001)
    assert gap > 0.001
