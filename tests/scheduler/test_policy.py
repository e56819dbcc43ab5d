import pytest

from jaxllm.scheduler.policy import (
    FCFS,
    CacheAware,
    LongestFirst,
    Policy,
    Priority,
    policy_named,
    room_to_return,
    weighted_loss,
)
from jaxllm.scheduler.request import Request


def _requests(*priorities: int) -> list[Request]:
    """Makes requests named after their order of arrival."""
    return [Request(str(i), [1], 1, priority=priority, order=i) for i, priority in enumerate(priorities)]


def _names(policy: Policy) -> list[str]:
    return [request.request_id for request in policy]


def _nothing_cached(request: Request) -> int:
    return 0


def test_fcfs_admits_in_order_of_arrival_whatever_the_priorities():
    policy = FCFS()
    a, b, c = _requests(2, 1, 0)
    for request in (a, b, c):
        policy.push(request)
    assert policy.head(_nothing_cached) is a
    policy.remove(a)
    assert policy.head(_nothing_cached) is b
    assert (list(policy), len(policy)) == ([b, c], 2)


@pytest.mark.parametrize("make", [FCFS, Priority])
def test_a_request_that_comes_back_has_its_old_place(make: type[FCFS]):
    policy = make()
    a, b, c, d = _requests(0, 0, 0, 0)
    for request in (d, b, c, a):
        policy.push(request)
    assert _names(policy) == ["0", "1", "2", "3"]


def test_priority_takes_the_lowest_number_first_and_then_the_oldest():
    policy = Priority()
    for request in _requests(1, 0, 2, 0, 1):
        policy.push(request)
    assert _names(policy) == ["1", "3", "0", "4", "2"]


def test_longest_first_goes_by_what_a_request_may_generate_and_then_by_arrival():
    policy = LongestFirst()
    requests = [Request(str(i), [1], length, order=i) for i, length in enumerate((5, 9, 5, 30))]
    for request in requests:
        policy.push(request)
    assert _names(policy) == ["3", "1", "0", "2"]
    assert policy.victim([requests[3], requests[1], requests[0], requests[2]], 1) == 3


def test_a_waiting_request_may_leave_from_the_middle_and_only_once():
    policy = FCFS()
    a, b, c = _requests(0, 0, 0)
    for request in (a, b, c):
        policy.push(request)
    policy.remove(b)
    assert list(policy) == [a, c]
    with pytest.raises(ValueError, match="'1' is not waiting"):
        policy.remove(b)


def test_the_victim_is_the_one_that_loses_least_and_the_newest_of_equals():
    running = _requests(0, 0, 0, 0)
    for request, computed in zip(running, (1, 5, 3, 3), strict=True):
        request.num_computed = computed
    assert FCFS().victim(running, first=1) == 3
    assert FCFS().victim(running, first=0) == 0


def test_what_was_found_in_the_cache_does_not_count_as_lost():
    running = _requests(0, 0)
    running[0].num_computed, running[0].num_found = 100, 96
    running[1].num_computed = 5
    assert FCFS().victim(running, first=0) == 0


def test_the_victim_is_of_the_worst_priority_even_if_it_loses_more():
    running = _requests(0, 1, 1)
    for request, computed in zip(running, (1, 50, 60), strict=True):
        request.num_computed = computed
    assert Priority().victim(running, first=0) == 1
    assert FCFS().victim(running, first=0) == 0


def test_every_time_a_request_yields_doubles_what_it_would_lose():
    request = Request("a", [1], 100, num_computed=10)
    assert [weighted_loss(request), setattr(request, "num_yields", 2), weighted_loss(request)] == [10, None, 40]


def test_a_request_that_yielded_returns_only_with_room_for_more_than_it_had_but_never_for_more_than_it_can_be():
    request = Request("a", [1] * 10, 100)
    assert room_to_return(request, 16) == 0
    seen = []
    for request.num_yields in (1, 2, 3, 4):
        seen.append(room_to_return(request, 16))
    assert seen == [10 + 32, 10 + 64, 110, 110]


def test_cache_aware_takes_the_longest_cached_prefix_of_equal_priority():
    policy = CacheAware(Priority())
    requests = _requests(0, 0, 0, 1)
    for request in requests:
        policy.push(request)
    cached = {"0": 0, "1": 16, "2": 16, "3": 64}
    assert policy.head(lambda request: cached[request.request_id]) is requests[1]
    assert policy.head(_nothing_cached) is requests[0]
    assert CacheAware(FCFS()).head(_nothing_cached) is None


def test_cache_aware_lets_nobody_be_overtaken_more_often_than_it_says():
    policy = CacheAware(FCFS(), patience=3)
    requests = _requests(*[0] * 9)
    for request in requests:
        policy.push(request)
    order = []
    while head := policy.head(lambda request: request.order):
        policy.remove(head)
        order.append(head.order)
    assert sorted(order) == list(range(9))
    assert all(order.index(i) - sum(j < i for j in order[: order.index(i)]) <= 3 for i in range(9))
    assert order[:4] == [7, 8, 6, 0]


def test_nothing_heads_an_empty_queue():
    assert FCFS().head(_nothing_cached) is None


def test_an_unknown_policy_is_refused_with_the_known_names():
    message = "policy 'lottery'; known: cache-aware, cache-aware-priority, fcfs, longest-first, priority"
    with pytest.raises(ValueError, match=message):
        policy_named("lottery")
