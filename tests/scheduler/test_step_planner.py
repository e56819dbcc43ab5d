"""Budget shares, preemption under pressure, and what a step costs in operations."""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import ScheduledBatch, Scheduler

type MakeScheduler = Callable[..., Scheduler]
type Add = Callable[..., Request]


def _schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def _chunks(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.count) for item in batch.items]


def test_the_threshold_caps_the_chunk_of_each_request(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(budget=10, long_prefill_token_threshold=4)
    add(scheduler, "a", 9)
    add(scheduler, "b", 5)
    assert _chunks(_schedule(scheduler)) == [("a", 0, 4), ("b", 0, 4)]
    assert _chunks(_schedule(scheduler)) == [("a", 4, 4), ("b", 4, 1)]


def test_the_prefill_share_leaves_the_rest_of_a_step_to_single_tokens(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(budget=64, max_prefill_tokens=3)
    for name in "abc":
        add(scheduler, name, 4)
    assert _chunks(_schedule(scheduler)) == [("a", 0, 4), ("b", 0, 1), ("c", 0, 1)]
    assert _chunks(_schedule(scheduler)) == [("a", 4, 1), ("b", 1, 3), ("c", 1, 2)]


def test_priorities_decide_who_is_served_first_and_who_yields(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(policy="priority", num_blocks=5, block_size=2, seqs=2)
    low, high = (add(scheduler, name, 4, max_new_tokens=4, priority=p) for name, p in (("low", 1), ("high", 0)))
    batch = _schedule(scheduler)
    assert _chunks(batch) == [("high", 0, 4), ("low", 0, 4)]
    scheduler.update(batch, [9, 9])
    batch = _schedule(scheduler)
    assert (_chunks(batch), batch.preempted) == ([("high", 4, 1)], (low,))
    assert high.num_preemptions == 0


def test_a_better_priority_starts_next_but_preempts_nobody_for_it(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(policy="priority", seqs=1)
    low = add(scheduler, "low", 1, max_new_tokens=2, priority=1)
    add(scheduler, "later", 1, priority=1)
    scheduler.update(_schedule(scheduler), [9])
    add(scheduler, "high", 1, priority=0)
    scheduler.update(_schedule(scheduler), [9])
    assert low.finish_reason == "length"
    assert _chunks(_schedule(scheduler)) == [("high", 0, 1)]


def _thrash(scheduler: Scheduler) -> Counter[str]:
    preempted, in_flight = Counter[str](), []
    while scheduler.has_work or in_flight:
        batch = scheduler.schedule()
        if batch is not None:
            preempted.update(request.request_id for request in batch.preempted)
            in_flight.append(batch)
        if len(in_flight) > (batch is not None):
            oldest = in_flight.pop(0)
            scheduler.update(oldest, [9] * len(oldest.items))
    return preempted


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [15, 33, 65])
def test_nobody_is_preempted_again_and_again_in_a_pool_of_a_tenth_of_the_demand(
    make_scheduler: MakeScheduler, add: Add, policy: str, caching: bool, num_blocks: int
):
    scheduler = make_scheduler(
        seqs=64,
        budget=2048,
        max_model_len=256,
        num_blocks=num_blocks,
        block_size=16,
        policy=policy,
        enable_prefix_caching=caching,
    )
    requests = [
        add(scheduler, str(i), 0, max_new_tokens=190, prompt=[1000 * i + j for j in range(16)], priority=i % 2)
        for i in range(50)
    ]
    preempted = _thrash(scheduler)
    scheduler.check()
    assert all(request.finish_reason == "length" for request in requests)
    assert sum(preempted.values()) > 30
    assert max(preempted.values()) <= 5


def _lines_of_a_step(make_scheduler: MakeScheduler, running: int, caching: bool) -> float:
    """Counts the lines of Python that sixteen steps of decoding execute in the scheduler, per step."""
    scheduler = make_scheduler(
        seqs=running,
        budget=32 * running,
        max_model_len=128,
        num_blocks=running * 8,
        block_size=16,
        enable_prefix_caching=caching,
    )
    for i in range(running):
        scheduler.add(Request(str(i), [i, *range(8 + i % 16)], 64))
    for _ in range(2):
        scheduler.update(_schedule(scheduler), [7] * running)
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # others may have hooked functions into it, whose lines would count
    for _ in range(16):
        sys.settrace(trace)
        batch = _schedule(scheduler)
        sys.settrace(before)
        assert len(batch.items) == running
        sys.settrace(trace)
        scheduler.update(batch, [7] * running)
        sys.settrace(before)
    gc.enable()
    return count / 16


@pytest.mark.parametrize("caching", [True, False])
def test_a_step_costs_a_few_lines_for_each_running_request_and_grows_linearly(
    make_scheduler: MakeScheduler, caching: bool
):
    few, many = (_lines_of_a_step(make_scheduler, running, caching) for running in (64, 256))
    assert many < 51 * 256
    assert many < 4.05 * few


def test_prefix_caching_adds_nothing_to_the_decode_path(make_scheduler: MakeScheduler):
    assert _lines_of_a_step(make_scheduler, 64, True) <= _lines_of_a_step(make_scheduler, 64, False)
