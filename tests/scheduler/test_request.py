from jaxllm.scheduler.request import Request, RequestStatus, RequestUpdate


def test_counts_tell_known_tokens_from_those_only_the_device_has_seen():
    request = Request("a", [1, 2, 3], 8, output_ids=[4], num_computed=3)
    request.num_tokens += 1
    assert (request.num_known, request.num_in_flight, request.num_pending) == (4, 1, 2)


def test_a_request_is_fully_sampled_when_its_last_token_is_on_its_way():
    request = Request("a", [1], 3, output_ids=[4])
    assert not request.is_fully_sampled
    request.num_in_flight = 2
    assert request.num_tokens == 4
    assert request.is_fully_sampled


def test_a_new_request_waits_and_holds_nothing():
    request = Request("a", [1], 3)
    assert request.status is RequestStatus.WAITING
    assert (request.row, request.block_tables, request.output_ids) == (None, [], [])


def test_two_requests_with_equal_fields_are_not_equal():
    assert Request("a", [1], 3) != Request("a", [1], 3)


def test_an_update_is_compared_by_its_fields():
    assert RequestUpdate("a", (1,)) == RequestUpdate("a", (1,))
    assert RequestUpdate("a", (1,)) != RequestUpdate("a", (2,))
