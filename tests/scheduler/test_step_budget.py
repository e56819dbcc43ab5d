"""Steps that fill the sizes they are padded to, and never put a prompt off for good."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.scheduler.batch import ScheduledBatch
from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.kv_groups import KVGroups
from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxllm.scheduler.step_budget import filled

SIZES = (16, 32, 64)

type MakeScheduler = Callable[..., Scheduler]
type Add = Callable[..., Request]


def _schedule(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    return batch


def _counts(batch: ScheduledBatch) -> dict[str, int]:
    return {item.request.request_id: item.count for item in batch.items}


def test_a_few_tokens_above_a_size_are_put_off():
    assert filled(SIZES, 34, 8) == 32
    assert filled(SIZES, 66, 8) == 66  # above the last size there is none to fill


def test_tokens_are_not_put_off_where_little_padding_is_saved_or_few_requests_share_the_wait():
    assert filled(SIZES, 62, 8) == 64
    assert filled(SIZES, 34, 1) == 64


def test_half_of_the_prompts_tokens_are_computed_at_least():
    assert filled(SIZES, 34, 30) == 32
    assert filled(SIZES, 35, 30) == 64


def test_a_step_below_the_first_size_is_as_it_is():
    assert filled(SIZES, 3, 2) == 16


@given(
    sizes=st.lists(st.integers(1, 9000), max_size=12, unique=True).map(sorted),
    num_requests=st.integers(1, 512),
    more=st.integers(1, 9000),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_step_with_prompts_brings_them_on(sizes: list[int], num_requests: int, more: int):
    size = filled(sizes, num_requests + more, num_requests)
    assert 2 * (size - num_requests) >= more


def test_the_last_prompt_is_cut_where_its_step_fills_a_size(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=8, step_sizes=SIZES)
    for name in "abcdef":
        add(scheduler, name, 3)
    add(scheduler, "g", 16)
    batch = _schedule(scheduler)
    assert batch.num_tokens == 32
    assert _counts(batch) == dict.fromkeys("abcdef", 3) | {"g": 14}
    assert _counts(_schedule(scheduler)) == dict.fromkeys("abcdefg", 1) | {"g": 2}
    scheduler.check()


def test_without_sizes_a_step_takes_all_that_fits(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=8)
    for name in "abcdef":
        add(scheduler, name, 3)
    add(scheduler, "g", 16)
    assert _schedule(scheduler).num_tokens == 34


def test_tokens_found_in_the_prefix_cache_do_not_count(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=8, step_sizes=SIZES)
    prompt = list(range(20))
    add(scheduler, "first", 0, prompt=prompt)
    _schedule(scheduler)
    for name in "abcde":
        add(scheduler, name, 0, prompt=[*prompt, ord(name)])  # 20 are found, 1 is left
    add(scheduler, "g", 27)
    batch = _schedule(scheduler)  # 1 + 5 + 27 = 33
    assert _counts(batch) == dict.fromkeys(("first", *"abcde"), 1) | {"g": 26}


def test_requests_for_which_blocks_will_not_do_are_not_counted_on(make_scheduler: MakeScheduler, add: Add):
    scheduler = make_scheduler(seqs=8, num_blocks=13, step_sizes=SIZES)
    for name in "abcdef":
        add(scheduler, name, 3)
    add(scheduler, "g", 20, max_new_tokens=2)
    # Without g there are 18 tokens, of which 16 fill a size; with it there would be 38.
    batch = _schedule(scheduler)
    assert batch.num_tokens == 16
    assert _counts(batch) == dict.fromkeys("abcde", 3) | {"f": 1}
    assert len(_schedule(scheduler).items) == 6


@given(lengths=st.lists(st.integers(1, 30), max_size=30), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_steps_of_any_traffic_overshoot_no_size_that_they_were_to_fill(lengths: list[int], seed: int):
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, step_sizes=SIZES)
    scheduler = Scheduler(config, BlockPool(30 + seed, 2), KVGroups((None,)))
    for i, length in enumerate(lengths):
        scheduler.add(Request(str(i), [1000 * i + j for j in range(length)], 1 + (i * seed) % 7))
    num_steps = 0
    while scheduler.has_work:
        wanted = scheduler._ranks[0]._budget.next(scheduler._ranks[0]._cut)[0]
        batch = _schedule(scheduler)
        assert batch.num_tokens <= wanted
        scheduler.update(batch, [7] * len(batch.items))
        scheduler.check()
        num_steps += 1
        assert num_steps < 2000


def test_more_running_requests_than_tokens_in_a_step_take_turns_with_a_token_at_least(
    make_scheduler: MakeScheduler, add: Add
):
    scheduler = make_scheduler(seqs=4, budget=2, step_sizes=(2,))
    requests = [add(scheduler, name, 5, max_new_tokens=2) for name in "abcd"]
    for _ in range(40):
        batch = scheduler.schedule()
        if batch is None:
            break
        assert all(item.count > 0 for item in batch.items)
        scheduler.update(batch, [7] * len(batch.items))
    assert all(request.finish_reason == "length" for request in requests)
