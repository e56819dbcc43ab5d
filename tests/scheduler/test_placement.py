"""On which data rank a request starts, and what they share."""

from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig


def make_scheduler(
    num_ranks: int = 2, *, seqs: int = 4, budget: int = 64, num_blocks: int = 65, **options
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=64, **options)
    return Scheduler(config, [BlockPool(num_blocks, 2) for _ in range(num_ranks)], KVGroups())


def add(scheduler: Scheduler, name: str, prompt: list[int], max_new_tokens: int = 8) -> Request:
    request = Request(name, prompt, max_new_tokens)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> list[list[str]]:
    """Runs a step; gives the names of what ran, by rank."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, [7] * len(batch.items))
    scheduler.check()
    return [[item.request.request_id for item in part.items] for part in batch.ranks]


def prompt(start: int, length: int) -> list[int]:
    return [1000 * start + i for i in range(length)]


def test_requests_go_where_most_blocks_are_left_and_to_the_lowest_of_equals():
    scheduler = make_scheduler(3)
    for index, (name, length) in enumerate([("long", 9), ("a", 3), ("b", 3), ("c", 4)]):
        add(scheduler, name, prompt(index, length))
    assert step(scheduler) == [["long"], ["a", "c"], ["b"]]


def test_blocks_that_a_prompt_under_way_will_take_count_as_taken():
    scheduler = make_scheduler(2, budget=4)
    for index, (name, length) in enumerate([("long", 30), ("a", 4)]):
        add(scheduler, name, prompt(index, length))
    assert step(scheduler) == [["long"], ["a"]]
    add(scheduler, "b", prompt(2, 3))
    assert step(scheduler) == [["long"], ["a", "b"]]


def test_a_cached_prefix_draws_a_request_until_its_rank_has_too_many_tokens():
    for imbalance, ranks in ((100, [["first", "again"], ["other"]]), (5, [["first"], ["other", "again"]])):
        scheduler = make_scheduler(2, rank_imbalance_tokens=imbalance)
        add(scheduler, "first", prompt(1, 30))
        add(scheduler, "other", prompt(2, 4))
        step(scheduler)
        add(scheduler, "again", prompt(1, 20))
        assert step(scheduler) == ranks


def test_samples_of_one_prompt_come_together():
    scheduler = make_scheduler(3)
    scheduler.add_group([Request(str(i), prompt(1, 9), 4) for i in range(4)])
    assert step(scheduler) == [["0"], [], []]
    assert step(scheduler) == [["0", "1", "2", "3"], [], []]
    assert scheduler.stats.num_forked_tokens == 24


def test_samples_that_find_no_room_beside_the_first_start_elsewhere():
    scheduler = make_scheduler(2, seqs=2)
    scheduler.add_group([Request(str(i), prompt(1, 9), 4) for i in range(4)])
    step(scheduler)
    assert step(scheduler) == [["0", "1"], ["2", "3"]]
    assert scheduler.stats.num_forked_tokens == 8


def test_no_request_waits_while_any_rank_can_start_it():
    scheduler = make_scheduler(2, seqs=2, num_blocks=9)
    for index in range(3):
        add(scheduler, str(index), prompt(index, 9), 2)
    assert step(scheduler) == [["0"], ["1"]]  # ten slots of sixteen each: no room for a third anywhere
    assert scheduler.num_waiting == 1
    assert scheduler.abort("1") is not None
    assert step(scheduler) == [["0"], ["2"]]


def test_a_preempted_request_goes_on_where_there_is_room():
    scheduler = make_scheduler(2, num_blocks=9, enable_prefix_caching=False)
    add(scheduler, "a", prompt(1, 6), 10)
    add(scheduler, "x", prompt(3, 12), 2)
    add(scheduler, "b", prompt(2, 2), 10)
    assert step(scheduler) == [["a", "b"], ["x"]]
    seen = []
    while scheduler.has_work:
        seen.append(step(scheduler))
    assert scheduler.stats.num_preemptions == 1
    moved = [ranks for ranks in seen if "b" in ranks[1]]
    assert moved, "it did not move"
    assert [stats.num_preemptions for stats in scheduler.rank_stats] == [1, 0]
