"""What a front keeps of its requests is what another engine needs to go on with them."""

from random import Random

from jaxllm import SamplingParams
from jaxllm.api.accepted import AcceptedRequests
from jaxllm.engine.messages import AddRequest
from jaxllm.scheduler.request import RequestUpdate


def add(accepted: AcceptedRequests, name: str, **params: object) -> AddRequest:
    return accepted.add(AddRequest(name, [1, 2, 3], SamplingParams(**params)))  # pyright: ignore[reportArgumentType]


def test_a_request_has_a_seed_before_any_engine_sees_it_and_keeps_it():
    accepted = AcceptedRequests("", Random(0))
    sent = [add(accepted, "a"), add(accepted, "b"), add(accepted, "c", seed=7), add(accepted, "d", temperature=0)]
    seeds = [request.params.seed for request in sent]
    assert seeds[0] is not None
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [7, None]
    assert accepted.unfinished() == sent


def test_only_what_has_begun_and_not_ended_is_sent_with_its_tokens():
    accepted = AcceptedRequests("", Random(0))
    add(accepted, "new")
    add(accepted, "begun")
    add(accepted, "ended")
    add(accepted, "two", n=2)
    accepted.take([RequestUpdate("begun", (5,)), RequestUpdate("begun", (6, 7)), RequestUpdate("ended", (1,), "stop")])
    accepted.take([RequestUpdate("0_two", (8,)), RequestUpdate("1_two", (9,), "length")])
    found = {request.request_id: request.outputs for request in accepted.unfinished()}
    assert found == {"new": None, "begun": {"begun": [5, 6, 7]}, "two": {"0_two": [8]}}


def test_updates_come_under_the_names_of_this_front_and_those_of_ended_samples_not_at_all():
    accepted = AcceptedRequests("3/", Random(0))
    assert add(accepted, "a", n=2).request_id == "3/a"
    told = accepted.take([RequestUpdate("0_3/a", (1,)), RequestUpdate("1_3/a", (2,), "stop"), RequestUpdate("0_a")])
    assert [(update.request_id, update.token_ids) for update in told] == [("0_a", (1,)), ("1_a", (2,))]
    assert accepted.take([RequestUpdate("1_3/a", (3,))]) == []
    assert len(accepted) == 1


def test_what_was_to_end_ends_with_the_engine_that_was_told_so():
    accepted = AcceptedRequests("", Random(0))
    add(accepted, "a")
    add(accepted, "b")
    assert accepted.abort(["a", "unknown"]) == ("a",)
    assert [(update.request_id, update.finish_reason) for update in accepted.end_aborted()] == [("a", "abort")]
    assert [request.request_id for request in accepted.unfinished()] == ["b"]
    assert accepted.abort_all() == ("b",)
    assert accepted.unfinished() == []
