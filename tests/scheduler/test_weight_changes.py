"""New weights between two steps: what goes on, what ends, and that no KV of older ones is ever found again."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler

type MakeScheduler = Callable[..., Scheduler]
type Add = Callable[..., Request]


def _step(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    """Runs one step; gives what it computed."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, [7] * len(batch.items))
    scheduler.check()
    return [(item.request.request_id, item.start, item.count) for item in batch.items]


def _change(scheduler: Scheduler, version: int | str, kv: Any) -> list[tuple[str, str | None, int]]:
    ended = scheduler.change_weights(version, kv)
    scheduler.check()
    return [(update.request_id, update.finish_reason, update.num_output_tokens) for update in ended]


def test_keep_goes_on_and_nothing_that_it_holds_is_found_then_or_later(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2)
    prompt = [1, 2, 3, 4, 5]
    add(scheduler, "old", 0, prompt=prompt, max_new_tokens=6)
    _step(scheduler)
    assert _change(scheduler, 1, "keep") == []
    add(scheduler, "new", 0, prompt=prompt, max_new_tokens=9)
    assert _step(scheduler) == [("old", 5, 1), ("new", 0, 5)]
    add(scheduler, "newer", 0, prompt=prompt, max_new_tokens=1)
    assert _step(scheduler) == [("old", 6, 1), ("new", 5, 1), ("newer", 4, 1)]  # from the blocks of "new"
    scheduler.abort("new")
    assert _step(scheduler) == [("old", 7, 1)]
    for start in (8, 9):
        assert _step(scheduler) == [("old", start, 1)]
    assert "old" not in scheduler.living  # its output's blocks are not remembered either: only "new" wrote 7s behind
    add(scheduler, "last", 0, prompt=[*prompt, 7, 7, 7, 7, 7], max_new_tokens=1)
    assert _step(scheduler) == [("last", 6, 4)]


def test_samples_do_not_start_from_their_siblings_older_kv(make_scheduler: MakeScheduler):
    scheduler = make_scheduler(block_size=2)
    scheduler.add_group([Request(f"{i}", [1, 2, 3, 4, 5], 4) for i in range(3)])
    assert _step(scheduler) == [("0", 0, 5)]
    _change(scheduler, 1, "keep")
    assert _step(scheduler) == [("0", 5, 1), ("1", 0, 5), ("2", 4, 1)]


def test_recompute_starts_what_runs_anew_and_its_tokens_stay(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2)
    request = add(scheduler, "a", 5)
    _step(scheduler)
    _step(scheduler)
    assert _change(scheduler, 1, "recompute") == []
    assert request.output_ids == [7, 7]
    assert _step(scheduler) == [("a", 0, 7)]
    again = add(scheduler, "b", 0, prompt=request.prompt_ids)
    _step(scheduler)
    assert again.num_cached_tokens == 4


def test_drop_ends_what_has_begun_also_where_it_waits_again(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=2)
    for name in "abc":
        add(scheduler, name, 3)
    _step(scheduler)
    scheduler.pause("a")
    assert _step(scheduler) == [("b", 3, 1), ("c", 0, 3)]
    add(scheduler, "d", 3)
    assert sorted(_change(scheduler, 1, "drop")) == [("a", "abort", 1), ("b", "abort", 2), ("c", "abort", 1)]
    assert list(scheduler.living) == ["d"]
    assert scheduler.stats.kv_usage == 0
    assert _step(scheduler) == [("d", 0, 3)]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_preempted_request_is_of_the_new_weights_when_it_comes_back(make_scheduler: MakeScheduler, add: Add, kv: str):
    scheduler = make_scheduler(block_size=2)
    request = add(scheduler, "a", 5, max_new_tokens=3)
    _step(scheduler)
    _change(scheduler, 1, kv)
    scheduler.pause("a")
    scheduler.resume("a")
    assert _step(scheduler) == [("a", 0, 6)]
    other = add(scheduler, "b", 0, prompt=request.prompt_ids)
    _step(scheduler)
    assert other.num_cached_tokens == 4


def test_every_update_bears_the_version_that_its_token_was_sampled_with(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    versions = []
    for version in (0, "second", 7):
        if version:
            scheduler.change_weights(version, "keep")
        batch = scheduler.schedule()
        assert batch is not None
        versions += [update.weight_version for update in scheduler.update(batch, [7])]
    update = scheduler.abort("a")
    assert update is not None
    assert [*versions, update.weight_version] == [0, "second", 7, 7]
