from collections.abc import Callable

import pytest

from jaxllm.scheduler.request import Request
from jaxllm.scheduler.scheduler import AdmissionError, Scheduler


def _refuse(scheduler: Scheduler, request: Request, message: str) -> None:
    with pytest.raises(AdmissionError, match=message) as caught:
        scheduler.add(request)
    assert "\n" not in str(caught.value)
    assert scheduler.num_waiting == 0
    scheduler.check()


def test_a_prompt_that_leaves_no_room_for_an_output_token_is_refused(make_scheduler: Callable[..., Scheduler]):
    scheduler = make_scheduler(max_model_len=8)
    _refuse(scheduler, Request("a", [1] * 8, 1), "8 tokens, but max_model_len 8 leaves room for 7")
    scheduler.add(Request("b", [1] * 7, 1))


def test_a_request_larger_than_the_whole_cache_is_refused(make_scheduler: Callable[..., Scheduler]):
    scheduler = make_scheduler(num_blocks=9, block_size=2, windows=(None, None))  # 4 blocks a group: 8 tokens
    _refuse(scheduler, Request("a", [1] * 5, 4), r"10 KV blocks \(5 prompt \+ 4 output .* 2 KV groups.* has 8")
    scheduler.add(Request("b", [1] * 5, 3))


def test_the_cache_is_asked_for_no_more_than_the_model_can_hold(make_scheduler: Callable[..., Scheduler]):
    scheduler = make_scheduler(max_model_len=8, num_blocks=5, block_size=2)
    scheduler.add(Request("a", [1] * 5, 1000))


def test_max_new_tokens_is_clipped_to_the_length_of_the_model(make_scheduler: Callable[..., Scheduler]):
    scheduler = make_scheduler(max_model_len=8)
    request = Request("a", [1] * 5, 1000)
    scheduler.add(request)
    assert request.max_new_tokens == 3


def test_an_empty_prompt_and_a_request_for_no_token_are_refused(make_scheduler: Callable[..., Scheduler]):
    _refuse(make_scheduler(), Request("a", [], 1), "prompt is empty")
    _refuse(make_scheduler(), Request("a", [1], 0), "max_new_tokens must be at least 1, got 0")


def test_the_id_of_a_living_request_is_refused_and_that_of_a_dead_one_is_not(make_scheduler: Callable[..., Scheduler]):
    scheduler = make_scheduler()
    scheduler.add(Request("a", [1], 1))
    with pytest.raises(AdmissionError, match="'a' belongs to a request that has not ended"):
        scheduler.add(Request("a", [1], 1))
    scheduler.abort("a")
    scheduler.add(Request("a", [1], 1))
    assert scheduler.num_waiting == 1


def test_a_request_that_ran_before_is_refused(make_scheduler: Callable[..., Scheduler]):
    scheduler, request = make_scheduler(), Request("a", [1], 1)
    scheduler.add(request)
    scheduler.abort("a")
    _refuse(scheduler, request, "'a' has run before")
