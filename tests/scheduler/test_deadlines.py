from collections.abc import Callable

from jaxllm.scheduler.deadlines import Deadlines
from jaxllm.scheduler.request import Request, RequestStatus
from jaxllm.scheduler.scheduler import Scheduler


def test_requests_are_due_once_in_the_order_of_their_deadlines():
    deadlines = Deadlines()
    a, b, c, d = (Request(name, [1], 1, deadline=at) for name, at in (("a", 3.0), ("b", 1.0), ("c", None), ("d", 9.0)))
    for request in (a, b, c, d):
        deadlines.add(request, 4)
    assert deadlines.due(0.5) == []
    assert deadlines.due(3.0) == [b, a]
    assert deadlines.due(3.0) == []
    d.status = RequestStatus.FINISHED
    assert deadlines.due(10.0) == []


def test_the_deadlines_of_ended_requests_do_not_pile_up():
    deadlines = Deadlines()
    for i in range(1000):
        request = Request(str(i), [1], 1, deadline=1e9, order=i)
        deadlines.add(request, 1)
        request.status = RequestStatus.FINISHED
    assert len(deadlines) < 100


def test_an_expired_request_ends_wherever_it_stands_and_says_by_when_it_was_due(
    make_scheduler: Callable[..., Scheduler], add: Callable[..., Request]
):
    scheduler = make_scheduler(seqs=1)
    running, waiting = add(scheduler, "a", 3, deadline=5.0), add(scheduler, "b", 3, deadline=6.0)
    paused, free = add(scheduler, "c", 3, deadline=7.0), add(scheduler, "d", 3)
    scheduler.pause("c")
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, [9])
    assert scheduler.expire(4.9) == []
    updates = scheduler.expire(100.0)
    assert [(u.request_id, u.finish_reason, u.num_output_tokens) for u in updates] == [
        ("a", "abort", 1),
        ("b", "abort", 0),
        ("c", "abort", 0),
    ]
    assert updates[0].error is not None
    assert updates[0].error.startswith("the deadline 5.0 passed (it is 100.0) after 1 of at most 8 output tokens")
    assert all(request.status is RequestStatus.FINISHED for request in (running, waiting, paused))
    assert list(scheduler.living) == [free.request_id]
    scheduler.check()
