"""Preemption, one step of lag between the device and the host, and steps that fail."""

from collections.abc import Callable, Sequence

import pytest

from jaxllm.scheduler.request import Request, RequestStatus, RequestUpdate
from jaxllm.scheduler.scheduler import ScheduledBatch, Scheduler

type MakeScheduler = Callable[..., Scheduler]
type Add = Callable[..., Request]


def _schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.check()
    return batch


def _update(scheduler: Scheduler, batch: ScheduledBatch, token: int = 9) -> Sequence[RequestUpdate]:
    updates = scheduler.update(batch, [token] * len(batch.items))
    scheduler.check()
    return updates


def _ids(batch: ScheduledBatch) -> list[str]:
    return [item.request.request_id for item in batch.items]


def test_the_newest_request_is_preempted_when_an_older_one_needs_a_block(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    a, b = add(scheduler, "a", 4, max_new_tokens=4), add(scheduler, "b", 3, max_new_tokens=4)
    _update(scheduler, _schedule(scheduler))
    batch = _schedule(scheduler)
    assert (_ids(batch), batch.preempted) == (["a"], (b,))
    assert (b.status, b.row, b.block_tables, b.num_computed) == (RequestStatus.WAITING, None, [[]], 0)
    assert b.output_ids == [9]
    assert (a.num_preemptions, b.num_preemptions, scheduler.stats.num_preemptions) == (0, 1, 1)


def test_a_request_that_is_its_own_victim_is_not_scheduled(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    a, b = add(scheduler, "a", 3, max_new_tokens=4), add(scheduler, "b", 4, max_new_tokens=4)
    _update(scheduler, _schedule(scheduler))
    batch = _schedule(scheduler)
    assert (_ids(batch), batch.preempted) == (["a"], (b,))
    assert a.num_computed == 4


def test_victims_go_back_in_their_order_and_ahead_of_new_requests(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=5, block_size=1)
    a, b, c = (add(scheduler, name, 1, max_new_tokens=3) for name in "abc")
    _update(scheduler, _schedule(scheduler))
    add(scheduler, "d", 1, max_new_tokens=1)
    second = _schedule(scheduler)  # a takes the last block, b the one of c
    assert (_ids(second), second.preempted) == (["a", "b"], (c,))
    _update(scheduler, second)
    third = _schedule(scheduler)  # a takes one of b's
    assert (_ids(third), third.preempted) == (["a"], (b,))
    _update(scheduler, third)
    assert a.finish_reason == "length"
    fourth = _schedule(scheduler)  # b takes three of four blocks; c needs two, and d may not overtake it
    assert _ids(fourth) == ["b"]
    _update(scheduler, fourth)
    assert _ids(_schedule(scheduler)) == ["c", "d"]


def test_a_preempted_request_computes_all_its_tokens_again(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=5, block_size=2, enable_prefix_caching=False)
    add(scheduler, "a", 4, max_new_tokens=2)
    b = add(scheduler, "b", 3, max_new_tokens=4)
    _update(scheduler, _schedule(scheduler))
    _update(scheduler, _schedule(scheduler))
    batch = _schedule(scheduler)
    (item,) = batch.items
    assert (item.request, item.start, item.count, item.samples) == (b, 0, 4, True)
    assert (batch.num_tokens, batch.num_recomputed) == (4, 3)
    stats = scheduler.stats
    assert (stats.num_scheduled_tokens, stats.num_recomputed_tokens, stats.num_useful_tokens) == (4 + 3 + 1 + 4, 3, 9)


def test_a_preempted_request_finds_its_blocks_again_if_nobody_took_them(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=6, block_size=2)
    add(scheduler, "a", 4, max_new_tokens=3)
    b = add(scheduler, "b", 4, max_new_tokens=4)
    for _ in range(3):
        _update(scheduler, _schedule(scheduler))
    batch = _schedule(scheduler)
    (item,) = batch.items
    assert (item.request, item.start, item.count, batch.num_recomputed) == (b, 4, 1, 0)
    stats = scheduler.stats
    assert (stats.num_refound_tokens, stats.prefix_cache_hits, b.num_cached_tokens) == (4, 0, 0)


def test_a_step_that_ran_short_of_blocks_admits_nobody(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=9, block_size=2, budget=5)
    add(scheduler, "a", 8, max_new_tokens=4)
    b = add(scheduler, "b", 7, max_new_tokens=2)
    for _ in range(3):
        _update(scheduler, _schedule(scheduler))
    fourth = _schedule(scheduler)  # three blocks are free now, enough for the first chunk of b
    assert (_ids(fourth), fourth.preempted) == (["a"], (b,))
    assert scheduler.num_waiting == 1


def test_a_request_that_yielded_returns_when_there_is_room_for_more_than_it_had(
    make_scheduler: MakeScheduler, add: Add
):
    scheduler = make_scheduler(num_blocks=8, block_size=2)
    add(scheduler, "a", 9, max_new_tokens=5)
    b = add(scheduler, "b", 4, max_new_tokens=9)
    _update(scheduler, _schedule(scheduler))
    batch = _schedule(scheduler)
    assert (_ids(batch), batch.preempted) == (["a"], (b,))
    _update(scheduler, batch)
    for _ in range(3):  # b's five tokens would do with three blocks, but two more would be too few soon
        batch = _schedule(scheduler)
        assert _ids(batch) == ["a"]
        _update(scheduler, batch)
    assert _ids(_schedule(scheduler)) == ["b"]


def test_the_first_of_all_is_never_preempted(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=7, block_size=2, seqs=2, enable_prefix_caching=False)
    a, b = add(scheduler, "a", 2, max_new_tokens=9), add(scheduler, "b", 8, max_new_tokens=4)
    while not a.finish_reason:
        _update(scheduler, _schedule(scheduler))
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


def test_a_token_can_be_computed_upon_before_the_host_has_read_it(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    first, second = _schedule(scheduler), _schedule(scheduler)
    (item,) = second.items
    assert (item.start, item.count, item.samples, request.num_in_flight) == (3, 1, True, 2)
    _update(scheduler, first, 7)
    _update(scheduler, second, 8)
    assert (request.output_ids, request.num_in_flight) == ([7, 8], 0)


def test_no_step_is_wasted_on_a_request_whose_last_token_is_on_its_way(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_new_tokens=2)
    first, second = _schedule(scheduler), _schedule(scheduler)
    assert scheduler.schedule() is None
    _update(scheduler, first)
    assert scheduler.schedule() is None
    assert scheduler.has_work
    assert _update(scheduler, second)[0].finish_reason == "length"
    assert (scheduler.has_work, scheduler.stats.num_discarded_tokens) == (False, 0)


@pytest.mark.parametrize("by_abort", [False, True])
def test_a_late_token_is_discarded_while_its_row_and_blocks_serve_another(
    make_scheduler: MakeScheduler, add: Add, by_abort: bool
):
    scheduler = make_scheduler(seqs=1, num_blocks=5, block_size=2)
    a = add(scheduler, "a", 3, max_new_tokens=4, eos=() if by_abort else (9,))
    b = add(scheduler, "b", 7, max_new_tokens=1)
    first, second = _schedule(scheduler), _schedule(scheduler)
    _update(scheduler, first)
    if by_abort:
        scheduler.abort("a")
    third = _schedule(scheduler)
    assert (_ids(third), b.row, scheduler.stats.kv_usage) == (["b"], 0, 1.0)
    assert _update(scheduler, second, 5) == []
    assert (a.output_ids, scheduler.stats.num_discarded_tokens) == ([9], 1)
    assert [update.request_id for update in _update(scheduler, third, 6)] == ["b"]


def test_a_preempted_request_waits_for_its_token_on_the_way_and_is_not_overtaken(
    make_scheduler: MakeScheduler, add: Add
):
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, "a", 4, max_new_tokens=4)
    b = add(scheduler, "b", 3, max_new_tokens=4)
    first, second = _schedule(scheduler), _schedule(scheduler)
    assert (second.preempted, b.num_in_flight) == ((b,), 1)
    add(scheduler, "c", 1, max_new_tokens=1)
    scheduler.abort("a")
    assert scheduler.schedule() is None  # every block is free, but only the device knows b's last token
    assert [update.token_ids for update in _update(scheduler, first, 7)] == [(7,)]
    third = _schedule(scheduler)
    assert [(item.request.request_id, item.start, item.count) for item in third.items] == [("b", 2, 2), ("c", 0, 1)]
    assert _update(scheduler, second) == []


def test_a_preempted_request_can_be_ended_by_the_token_on_its_way(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, "a", 4, max_new_tokens=4)
    b = add(scheduler, "b", 3, max_new_tokens=4, eos=(7,))
    first, second = _schedule(scheduler), _schedule(scheduler)
    assert second.preempted == (b,)
    assert [update.finish_reason for update in _update(scheduler, first, 7)] == [None, "stop"]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)


def test_a_request_waits_a_step_instead_of_preempting_when_blocks_are_about_to_come_back(
    make_scheduler: MakeScheduler, add: Add
):
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, "a", 3, max_new_tokens=1)
    b = add(scheduler, "b", 4, max_new_tokens=4)
    first = _schedule(scheduler)
    assert scheduler.schedule() is None
    assert (b.status, b.num_computed) == (RequestStatus.RUNNING, 4)
    scheduler.check()
    _update(scheduler, first)
    assert _ids(_schedule(scheduler)) == ["b"]
    assert scheduler.stats.num_preemptions == 0


def test_a_failed_step_ends_its_living_requests_and_no_others(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=3)
    for name in "abcd":
        add(scheduler, name, 3)
    batch = _schedule(scheduler)
    scheduler.abort("b")
    updates = scheduler.fail(batch, "out of memory")
    scheduler.check()
    assert updates == [RequestUpdate(name, (), "error", None, "out of memory", 3, 0) for name in "ac"]
    assert scheduler.stats.kv_usage == 0
    assert _ids(_schedule(scheduler)) == ["d"]


def test_after_a_loss_running_requests_start_anew_in_order_and_ahead_of_waiting_ones(
    make_scheduler: MakeScheduler, add: Add
):
    scheduler = make_scheduler(budget=4)
    for name in "ab":
        add(scheduler, name, 2)
    c, d, _ = (add(scheduler, name, 1) for name in "cde")
    first, second = _schedule(scheduler), _schedule(scheduler)
    assert (_ids(first), _ids(second)) == (["a", "b"], ["a", "b", "c", "d"])
    assert [update.request_id for update in scheduler.fail(first, "device lost")] == ["a", "b"]
    scheduler.recompute_all([second])
    scheduler.check()
    assert (c.num_in_flight, d.num_computed, scheduler.stats.kv_usage, scheduler.num_running) == (0, 0, 0, 0)
    third = _schedule(scheduler)
    assert [(item.request.request_id, item.row, item.start, item.count) for item in third.items] == [
        ("c", 0, 0, 1),
        ("d", 1, 0, 1),
        ("e", 2, 0, 1),
    ]
    assert (scheduler.stats.num_recomputed_tokens, scheduler.stats.num_preemptions) == (2, 0)


def test_a_preempted_request_does_not_wait_for_a_token_that_was_lost(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    a, b = add(scheduler, "a", 4, max_new_tokens=4), add(scheduler, "b", 3, max_new_tokens=4)
    in_flight = [_schedule(scheduler), _schedule(scheduler)]
    assert (in_flight[1].preempted, b.num_in_flight) == ((b,), 1)
    scheduler.recompute_all(in_flight)
    scheduler.check()
    assert (a.num_in_flight, b.num_in_flight) == (0, 0)
    assert _ids(_schedule(scheduler)) == ["a"]
    scheduler.abort("a")
    assert _ids(_schedule(scheduler)) == ["b"]


def test_a_token_computed_before_the_loss_is_still_read(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    first, second = _schedule(scheduler), _schedule(scheduler)
    scheduler.recompute_all([second])
    assert scheduler.schedule() is None
    _update(scheduler, first, 7)
    assert request.output_ids == [7]
    (item,) = _schedule(scheduler).items
    assert (item.start, item.count) == (0, 4)
