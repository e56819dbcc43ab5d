"""Pauses of one request and of all, and a snapshot that another scheduler continues from."""

import json
from collections.abc import Callable

import pytest

from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.policy import FCFS
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.scheduler import AdmissionError, ScheduledBatch, Scheduler, SchedulerConfig

type MakeScheduler = Callable[..., Scheduler]
type Add = Callable[..., Request]


def _schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.check()
    return batch


def _chunks(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.count) for item in batch.items]


def test_a_paused_request_gives_all_back_keeps_its_tokens_and_goes_on_when_resumed(
    make_scheduler: MakeScheduler, add: Add
):
    scheduler = make_scheduler(enable_prefix_caching=False)
    request = add(scheduler, "a", 3)
    first, second = _schedule(scheduler), _schedule(scheduler)
    scheduler.update(first, [7])
    assert scheduler.pause("a")
    scheduler.check()
    assert (request.row, scheduler.stats.kv_usage, scheduler.has_work, scheduler.stats.paused) == (None, 0, False, 1)
    assert (request.num_preemptions, scheduler.stats.num_preemptions) == (1, 0)
    scheduler.update(second, [8])
    assert request.output_ids == [7, 8]
    assert scheduler.schedule() is None
    assert scheduler.resume("a")
    batch = _schedule(scheduler)
    assert (_chunks(batch), batch.num_recomputed) == ([("a", 0, 5)], 4)


def test_a_paused_request_may_end_by_a_token_on_its_way(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3, eos=(7,))
    batch = _schedule(scheduler)
    scheduler.pause("a")
    assert scheduler.update(batch, [7])[0].finish_reason == "stop"
    scheduler.check()
    assert (request.status, scheduler.resume("a"), dict(scheduler.living)) == (RequestStatus.FINISHED, False, {})


def test_a_resumed_request_has_its_old_place_in_the_line(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=1)
    for name in "abc":
        add(scheduler, name, 1)
    assert scheduler.pause("a")
    assert scheduler.resume("a")
    assert _chunks(_schedule(scheduler)) == [("a", 0, 1)]


def test_pausing_and_resuming_say_whether_they_did_anything(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 1)
    assert [scheduler.resume("a"), scheduler.pause("a"), scheduler.pause("a")] == [False, True, False]
    assert [scheduler.resume("a"), scheduler.pause("b"), scheduler.resume("b")] == [True, False, False]
    scheduler.pause("a")
    assert scheduler.abort("a") is not None
    scheduler.check()


def test_a_paused_leader_leaves_the_prompt_to_the_next_sample(make_scheduler: MakeScheduler):
    scheduler = make_scheduler()
    scheduler.add_group([Request(name, [1, 2, 3], 4) for name in "abc"])
    scheduler.pause("a")
    scheduler.pause("c")
    scheduler.check()
    assert _chunks(_schedule(scheduler)) == [("b", 0, 3)]
    assert scheduler.resume("c")
    assert _chunks(_schedule(scheduler)) == [("b", 3, 1), ("c", 2, 1)]


@pytest.mark.parametrize("mode", ["keep", "drop"])
def test_a_paused_scheduler_schedules_nothing_and_goes_on_where_it_was(
    make_scheduler: MakeScheduler, add: Add, mode: str
):
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    batch = _schedule(scheduler)
    scheduler.pause_all(mode)  # pyright: ignore[reportArgumentType]
    add(scheduler, "b", 1)
    assert (scheduler.is_paused, scheduler.has_work, scheduler.schedule()) == (True, False, None)
    assert (scheduler.stats.kv_usage > 0) == (mode == "keep")
    scheduler.update(batch, [7])
    scheduler.check()
    scheduler.resume_all()
    assert not scheduler.is_paused
    expected = [("a", 4, 1), ("b", 0, 1)] if mode == "keep" else [("a", 0, 5), ("b", 0, 1)]
    assert _chunks(_schedule(scheduler)) == expected


def test_an_unknown_way_to_pause_is_refused(make_scheduler: MakeScheduler):
    with pytest.raises(ValueError, match="'keep' or 'drop', got 'abort'"):
        make_scheduler().pause_all("abort")  # pyright: ignore[reportArgumentType]


def test_a_snapshot_keeps_tokens_order_pauses_and_groups(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=2, policy="priority", budget=4)
    add(
        scheduler, "a", 6, eos=(3,), stop=(5,), priority=1, deadline=8.0, cache_salt="s", kv_key=("k",), params={"t": 1}
    )
    add(scheduler, "b", 2, priority=0)
    scheduler.add_group([Request(name, [1, 2, 3], 4, priority=2) for name in ("x", "y", "z")])
    scheduler.update(_schedule(scheduler), [9, 9])
    scheduler.pause("b")
    scheduler.pause("z")
    taken = scheduler.snapshot(lambda params: None if params is None else list(params.items()))
    restored = Scheduler.restore(
        json.loads(json.dumps(taken)), BlockPool(65, 2), KVGroups(), decode_params=lambda p: p and dict(p)
    )
    restored.check()
    assert (restored.config, restored.num_waiting, restored.stats.paused) == (scheduler.config, 3, 2)
    a = restored.living["a"]
    assert (a.eos_token_ids, a.stop_token_ids, a.deadline, a.cache_salt, a.kv_key, a.params) == (
        frozenset([3]),
        frozenset([5]),
        8.0,
        "s",
        ("k",),
        {"t": 1},
    )
    assert restored.living["b"].output_ids == [9]
    batch = _schedule(restored)
    assert (_chunks(batch), batch.num_recomputed) == ([("a", 0, 4)], 2)
    assert _chunks(_schedule(restored)) == [("a", 4, 2), ("x", 0, 2)]
    assert [update.request_id for update in restored.expire(8.0)] == ["a"]
    assert _chunks(_schedule(restored)) == [("x", 2, 1)]
    assert _chunks(_schedule(restored)) == [("x", 3, 1), ("y", 2, 1)]
    add(restored, "new", 1, priority=2)
    assert restored.living["new"].order > max(r.order for r in scheduler.living.values())


def test_a_snapshot_that_does_not_fit_is_refused(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(max_model_len=32)
    add(scheduler, "a", 10, max_new_tokens=20)
    taken = scheduler.snapshot()
    small = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4, max_model_len=20)
    with pytest.raises(AdmissionError, match=r"'a' may have 10 \+ 20 tokens, but max_model_len is 20 now"):
        Scheduler.restore(taken, BlockPool(65, 2), KVGroups(), small)
    with pytest.raises(AdmissionError, match="15 KV blocks"):
        Scheduler.restore(taken, BlockPool(5, 2), KVGroups())
    with pytest.raises(ValueError, match="version 0; this is version 2"):
        Scheduler.restore(taken | {"version": 0}, BlockPool(65, 2), KVGroups())


def test_a_policy_passed_as_an_object_has_to_be_passed_again(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(policy=FCFS())
    add(scheduler, "a", 3)
    taken = scheduler.snapshot()
    with pytest.raises(ValueError, match="policy was an object; pass a config"):
        Scheduler.restore(taken, BlockPool(65, 2), KVGroups())
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4, max_model_len=32, policy=FCFS())
    assert Scheduler.restore(taken, BlockPool(65, 2), KVGroups(), config).num_waiting == 1
