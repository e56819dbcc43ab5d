"""Prefix hits and parallel samples as a user of the scheduler sees them: what is computed, and what is counted."""

from collections.abc import Callable

import pytest

from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import AdmissionError, ScheduledBatch, Scheduler

type MakeScheduler = Callable[..., Scheduler]
type Add = Callable[..., Request]


def _schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.check()
    return batch


def _chunks(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.count) for item in batch.items]


def _run(scheduler: Scheduler) -> int:
    """Runs all to the end, one step ahead of the host; gives the tokens that were computed."""
    before, in_flight = scheduler.stats.num_scheduled_tokens, []
    while scheduler.has_work or in_flight:
        batch = scheduler.schedule()
        if batch is not None:
            in_flight.append(batch)
        if len(in_flight) > (batch is not None):
            oldest = in_flight.pop(0)
            scheduler.update(oldest, [item.start % 7 for item in oldest.items])
        scheduler.check()
    assert scheduler.stats.kv_usage == 0
    return scheduler.stats.num_scheduled_tokens - before


@pytest.mark.parametrize("budget", [512, 1024, 4096])
def test_a_prefix_shared_by_64_requests_is_computed_once(make_scheduler: MakeScheduler, add: Add, budget: int):
    scheduler = make_scheduler(seqs=64, budget=budget, max_model_len=2048, num_blocks=1001, block_size=16)
    prefix = list(range(1500))
    for i in range(64):
        add(scheduler, str(i), 0, max_new_tokens=1, prompt=[*prefix, 5000 + i])
    computed = _run(scheduler)
    shared = 1500 // 16 * 16
    assert computed == shared + 64 * (1501 - shared)
    stats = scheduler.stats
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (64 * 1501, 63 * shared)
    for i in range(64):
        add(scheduler, f"again {i}", 0, max_new_tokens=1, prompt=[*prefix, 5000 + i])
    assert _run(scheduler) == 64 * (1501 - shared)
    assert scheduler.stats.prefix_cache_hits == 127 * shared


def test_a_prefix_is_shared_in_the_very_step_that_computes_it(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2)
    a = add(scheduler, "a", 0, prompt=[1, 2, 3, 4, 5])
    b = add(scheduler, "b", 0, prompt=[1, 2, 3, 4, 6])
    assert _chunks(_schedule(scheduler)) == [("a", 0, 5), ("b", 4, 1)]
    assert a.block_tables[0][:2] == b.block_tables[0][:2]
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 4)


def test_one_token_is_always_left_to_compute(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2)
    add(scheduler, "a", 0, max_new_tokens=1, prompt=[1, 2, 3, 4])
    _run(scheduler)
    add(scheduler, "b", 0, max_new_tokens=1, prompt=[1, 2, 3, 4])
    batch = _schedule(scheduler)
    assert _chunks(batch) == [("b", 2, 2)]
    (update,) = scheduler.update(batch, [9])
    assert update.num_cached_tokens == 2


def test_the_output_of_an_ended_request_is_found_by_the_next_turn(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2)
    a = add(scheduler, "a", 0, max_new_tokens=6, prompt=[1, 2, 3])
    _run(scheduler)
    add(scheduler, "b", 0, prompt=[1, 2, 3, *a.output_ids, 9, 9])
    # a's last token was sampled but never computed, so that its last full block ends before it.
    assert _chunks(_schedule(scheduler)) == [("b", 8, 3)]


def test_a_token_discarded_late_is_in_no_block_that_is_found(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2)
    add(scheduler, "a", 0, prompt=[1, 2, 3], eos=(7,))
    first, second, third = _schedule(scheduler), _schedule(scheduler), _schedule(scheduler)
    scheduler.update(first, [7])
    scheduler.update(second, [8])
    scheduler.update(third, [8])
    assert scheduler.stats.num_discarded_tokens == 2
    add(scheduler, "b", 0, prompt=[1, 2, 3, 7, 8, 8, 8, 8])
    assert _chunks(_schedule(scheduler)) == [("b", 4, 4)]


@pytest.mark.parametrize("other", [{"cache_salt": "x"}, {"kv_key": ("adapter",)}, {"skip_prefix_cache": True}])
def test_nothing_is_found_across_salts_or_adapters_or_by_who_does_not_ask(
    make_scheduler: MakeScheduler, add: Add, other: dict
):
    scheduler = make_scheduler(block_size=2)
    add(scheduler, "a", 0, prompt=[1, 2, 3, 4, 5])
    b = add(scheduler, "b", 0, prompt=[1, 2, 3, 4, 5], **other)
    c = add(scheduler, "c", 0, prompt=[1, 2, 3, 4, 5], **other)
    _schedule(scheduler)
    assert b.num_cached_tokens == 0
    assert c.num_cached_tokens == (0 if "skip_prefix_cache" in other else 4)
    assert scheduler.stats.prefix_cache_queries == (5 if "skip_prefix_cache" in other else 15)


def test_nothing_is_remembered_when_prefix_caching_is_off(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2, enable_prefix_caching=False)
    for name in "abc":
        assert add(scheduler, name, 0, max_new_tokens=1, prompt=[1, 2, 3, 4, 5]).num_cached_tokens == 0
    assert _run(scheduler) == 15
    assert (scheduler.stats.prefix_cache_queries, scheduler.stats.prefix_cache_hits) == (0, 0)
    assert scheduler._ranks[0].kv.pool.num_cached == 0


def test_the_cache_can_be_reset_only_while_nobody_holds_blocks(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2)
    add(scheduler, "a", 0, prompt=[1, 2, 3, 4, 5])
    _schedule(scheduler)
    assert not scheduler.reset_prefix_cache()
    scheduler.abort("a")
    assert scheduler.reset_prefix_cache()
    assert add(scheduler, "b", 0, prompt=[1, 2, 3, 4, 5]).num_cached_tokens == 0
    assert _chunks(_schedule(scheduler)) == [("b", 0, 5)]


def test_a_window_is_hit_with_only_the_blocks_it_sees(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2, windows=(None, 3), budget=4, num_blocks=30)
    add(scheduler, "a", 0, max_new_tokens=1, prompt=list(range(13)))
    _run(scheduler)
    pool = scheduler._ranks[0].kv.pool
    digests = scheduler._ranks[0].kv.find(Request("x", list(range(13)), 1))
    assert digests.num_tokens == 12
    assert [len(digests.tables[0]), digests.tables[1][:5]] == [6, [0] * 5]  # token 12 sees 10 and on
    pool.lend(pool.num_free - 12)  # evicts what was given back first: the window's oldest blocks
    assert scheduler._ranks[0].kv.find(Request("x", list(range(13)), 1)).num_tokens == 12


def test_a_hit_holds_in_all_groups_or_is_shortened_until_it_does(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2, windows=(None, 3), num_blocks=30)
    request = add(scheduler, "a", 0, max_new_tokens=1, prompt=list(range(13)))
    _run(scheduler)
    pool = scheduler._ranks[0].kv.pool
    lost = pool._block_of.pop(request.block_hashes[5] + scheduler._ranks[0].kv._suffixes[1])
    del pool._key_of[lost]
    assert scheduler._ranks[0].kv.find(Request("x", list(range(13)), 1)).num_tokens == 10
    lost = pool._block_of.pop(request.block_hashes[2] + scheduler._ranks[0].kv._suffixes[0])
    del pool._key_of[lost]
    assert scheduler._ranks[0].kv.find(Request("x", list(range(13)), 1)).num_tokens == 4


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_prompt", "copied"), [(5, 0), (6, 1), (4, 1), (1, 0)])
def test_parallel_samples_share_their_prompt_and_copy_its_last_block(
    make_scheduler: MakeScheduler, caching: bool, num_prompt: int, copied: int
):
    scheduler = make_scheduler(block_size=2, enable_prefix_caching=caching)
    samples = [Request(name, list(range(num_prompt)), 4) for name in "abc"]
    scheduler.add_group(samples)
    assert (_chunks(_schedule(scheduler)), scheduler.num_waiting) == ([("a", 0, num_prompt)], 2)
    batch = _schedule(scheduler)
    assert _chunks(batch) == [("a", num_prompt, 1), ("b", num_prompt - 1, 1), ("c", num_prompt - 1, 1)]
    assert len(batch.ranks[0].copies) == 2 * copied
    shared = (num_prompt - 1) // 2
    assert samples[0].block_tables[0][:shared] == samples[1].block_tables[0][:shared]
    for sample, (source, destination) in zip(samples[1:], batch.ranks[0].copies, strict=False):
        assert (source, destination) == (samples[0].block_tables[0][shared], sample.block_tables[0][shared])
    assert (scheduler.stats.num_forked_tokens, scheduler.stats.prefix_cache_hits) == (2 * (num_prompt - 1), 0)
    assert [sample.num_cached_tokens for sample in samples] == [0, num_prompt - 1, num_prompt - 1]


def test_siblings_wait_for_the_last_chunk_and_others_do_not_wait_for_them(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(block_size=2, long_prefill_token_threshold=3)
    scheduler.add_group([Request(name, list(range(7)), 4) for name in "ab"])
    add(scheduler, "c", 2)
    assert _chunks(_schedule(scheduler)) == [("a", 0, 3), ("c", 0, 2)]
    assert _chunks(_schedule(scheduler)) == [("a", 3, 3), ("c", 2, 1)]
    assert _chunks(_schedule(scheduler)) == [("a", 6, 1), ("c", 3, 1)]
    assert _chunks(_schedule(scheduler)) == [("a", 7, 1), ("c", 4, 1), ("b", 6, 1)]


def test_when_the_first_sample_ends_early_the_next_one_computes_the_prompt(make_scheduler: MakeScheduler):
    scheduler = make_scheduler(block_size=2, enable_prefix_caching=False)
    scheduler.add_group([Request(name, list(range(5)), 4) for name in "abc"])
    scheduler.abort("a")
    assert _chunks(_schedule(scheduler)) == [("b", 0, 5)]
    assert _chunks(_schedule(scheduler)) == [("b", 5, 1), ("c", 4, 1)]


def test_samples_of_different_prompts_or_salts_or_names_in_use_are_refused_together(make_scheduler: MakeScheduler):
    scheduler = make_scheduler()
    with pytest.raises(AdmissionError, match="'a' and 'b' have different prompts"):
        scheduler.add_group([Request("a", [1], 1), Request("b", [2], 1)])
    with pytest.raises(AdmissionError, match="'a' and 'b' differ in cache_salt"):
        scheduler.add_group([Request("a", [1], 1), Request("b", [1], 1, cache_salt="x")])
    with pytest.raises(AdmissionError, match="id 'a' belongs to"):
        scheduler.add_group([Request("a", [1], 1), Request("a", [1], 1)])
    assert not scheduler.has_work
