import pytest

from jaxllm.scheduler.policy import FCFS, policy_named
from jaxllm.scheduler.request import Request


def _requests(*names: str) -> list[Request]:
    return [Request(name, [1], 1) for name in names]


def test_fcfs_admits_in_order_of_arrival():
    policy = FCFS()
    a, b, c = _requests("a", "b", "c")
    for request in (a, b, c):
        policy.push(request)
    assert policy.head() is a
    policy.remove(a)
    assert policy.head() is b
    assert list(policy) == [b, c]
    assert len(policy) == 2


def test_fcfs_puts_a_preempted_request_ahead_of_all():
    policy = FCFS()
    a, b, c = _requests("a", "b", "c")
    policy.push(c)
    policy.put_back(b)
    policy.put_back(a)
    assert list(policy) == [a, b, c]


def test_fcfs_lets_a_waiting_request_leave_from_the_middle():
    policy = FCFS()
    a, b, c = _requests("a", "b", "c")
    for request in (a, b, c):
        policy.push(request)
    policy.remove(b)
    assert list(policy) == [a, c]


def test_fcfs_preempts_the_newest_admitted():
    assert FCFS().victim(_requests("a", "b", "c"), first=0) == 2


def test_nothing_heads_an_empty_queue():
    assert FCFS().head() is None


def test_an_unknown_policy_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match="unknown scheduling policy 'lottery'; known: fcfs"):
        policy_named("lottery")
