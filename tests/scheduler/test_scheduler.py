from collections.abc import Callable, Sequence

import pytest

from jaxllm.scheduler.request import Request, RequestStatus, RequestUpdate
from jaxllm.scheduler.scheduler import ScheduledBatch, Scheduler

type MakeScheduler = Callable[..., Scheduler]
type Add = Callable[..., Request]


def _chunks(batch: ScheduledBatch | None) -> list[tuple[str, int, int, bool]]:
    assert batch is not None
    return [(item.request.request_id, item.start, item.count, item.samples) for item in batch.items]


def _step(scheduler: Scheduler, token: int = 9) -> Sequence[RequestUpdate]:
    """Schedules, answers every item with one token, and reads it at once."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.check()
    updates = scheduler.update(batch, [token] * len(batch.items))
    scheduler.check()
    return updates


def test_an_idle_scheduler_schedules_nothing(make_scheduler: MakeScheduler):
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_a_prompt_is_computed_in_one_step_and_then_one_token_a_step(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    first = scheduler.schedule()
    assert _chunks(first) == [("a", 0, 5, True)]
    assert first is not None
    scheduler.update(first, [9])
    second = scheduler.schedule()
    assert _chunks(second) == [("a", 5, 1, True)]
    assert second is not None
    assert (first.step, second.step) == (1, 2)
    assert (first.num_tokens, second.num_tokens) == (5, 1)


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_only_the_last_samples(
    make_scheduler: MakeScheduler, add: Add
):
    scheduler = make_scheduler(budget=4)
    request = add(scheduler, "a", 10)
    seen = []
    for _ in range(3):
        batch = scheduler.schedule()
        seen += _chunks(batch)
        assert batch is not None
        scheduler.update(batch, [9])
        scheduler.check()
    assert seen == [("a", 0, 4, False), ("a", 4, 4, False), ("a", 8, 2, True)]
    assert request.output_ids == [9]


def test_running_requests_are_served_before_waiting_ones_within_one_budget(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(budget=6)
    add(scheduler, "a", 2)
    add(scheduler, "b", 9)
    add(scheduler, "c", 1)
    assert _chunks(scheduler.schedule()) == [("a", 0, 2, True), ("b", 0, 4, False)]
    assert _chunks(scheduler.schedule()) == [("a", 2, 1, True), ("b", 4, 5, True)]
    assert _chunks(scheduler.schedule()) == [("a", 3, 1, True), ("b", 9, 1, True), ("c", 0, 1, True)]


def test_no_more_requests_run_than_there_are_rows(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=2)
    for name in "abc":
        add(scheduler, name, 1)
    assert len(_chunks(scheduler.schedule())) == 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_the_lowest_free_row_is_given_first_and_kept_for_life(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=3)
    a, b, c = (add(scheduler, name, 1) for name in "abc")
    _step(scheduler)
    assert (a.row, b.row, c.row) == (0, 1, 2)
    scheduler.abort("b")
    scheduler.abort("a")
    assert (a.row, b.row) == (None, None)
    d, e = add(scheduler, "d", 1), add(scheduler, "e", 1)
    _step(scheduler)
    assert (d.row, e.row, c.row) == (0, 1, 2)


def test_every_group_gets_a_table_that_covers_the_computed_tokens(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2, windows=(None, None, None), budget=3)
    request = add(scheduler, "a", 7)
    _step(scheduler)
    assert [len(table) for table in request.block_tables] == [2, 2, 2]
    _step(scheduler)
    assert [len(table) for table in request.block_tables] == [3, 3, 3]


def test_admission_waits_for_blocks_and_preempts_nobody(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(num_blocks=5, block_size=2)
    add(scheduler, "a", 5, max_new_tokens=1)
    add(scheduler, "b", 4, max_new_tokens=1)
    add(scheduler, "c", 1, max_new_tokens=1)  # would fit, but may not overtake b
    batch = scheduler.schedule()
    assert _chunks(batch) == [("a", 0, 5, True)]
    assert batch is not None
    assert batch.preempted == ()
    scheduler.update(batch, [9])
    assert _chunks(scheduler.schedule()) == [("b", 0, 4, True), ("c", 0, 1, True)]


def test_a_sampled_eos_ends_a_request_and_is_part_of_its_tokens(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3, eos=(9,), stop=(9, 8))
    assert _step(scheduler) == [
        RequestUpdate("a", (9,), "stop", None, num_prompt_tokens=3, num_output_tokens=1, num_cached_tokens=0)
    ]
    assert (request.status, request.finish_reason, request.stop_reason) == (RequestStatus.FINISHED, "stop", None)
    assert not scheduler.has_work
    assert scheduler.stats.kv_usage == 0


def test_a_stop_token_is_named_as_the_reason(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 3, eos=(7,), stop=(9,))
    assert _step(scheduler, token=8)[0].finish_reason is None
    assert _step(scheduler, token=9) == [
        RequestUpdate("a", (9,), "stop", 9, num_prompt_tokens=3, num_output_tokens=2, num_cached_tokens=0)
    ]


def test_a_request_ends_with_its_last_allowed_token(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_new_tokens=2)
    assert _step(scheduler)[0].finish_reason is None
    assert _step(scheduler)[0].finish_reason == "length"
    assert scheduler.schedule() is None


def test_a_stop_token_in_the_last_place_counts_as_a_stop(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_new_tokens=1, stop=(9,))
    assert _step(scheduler)[0].finish_reason == "stop"


@pytest.mark.parametrize("running", [False, True])
def test_an_aborted_request_gives_everything_back(make_scheduler: MakeScheduler, add: Add, running: bool):
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    if running:
        _step(scheduler)
    assert scheduler.abort("a") == RequestUpdate("a", (), "abort", num_prompt_tokens=3, num_output_tokens=int(running))
    scheduler.check()
    assert (scheduler.has_work, scheduler.stats.kv_usage) == (False, 0)


def test_aborting_an_unknown_or_ended_request_changes_nothing(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_new_tokens=1)
    _step(scheduler)
    assert scheduler.abort("a") is None
    assert scheduler.abort("b") is None


def test_tokens_are_read_once_in_order_and_one_for_each_item(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    with pytest.raises(ValueError, match="step 1 has 1 items, got 2 token ids"):
        scheduler.update(first, [1, 2])
    scheduler.update(first, [1])
    scheduler.update(second, [2])
    with pytest.raises(ValueError, match="step 1 came after step 2"):
        scheduler.update(first, [1])


def test_stats_count_requests_blocks_and_tokens(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=1, num_blocks=11, block_size=2)
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    _step(scheduler)
    _step(scheduler)
    stats = scheduler.stats
    assert (stats.running, stats.waiting, stats.kv_usage) == (1, 1, 0.3)
    assert (stats.num_scheduled_tokens, stats.num_recomputed_tokens, stats.num_discarded_tokens) == (6, 0, 0)
