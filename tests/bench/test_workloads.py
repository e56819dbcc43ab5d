from jaxllm.bench.args import WORKLOAD_NAMES
from jaxllm.bench.workloads import WORKLOADS, digest, folded, random_requests, workload

DIGESTS = {
    "L1": "7aeb40c0dbac2c7f",
    "L8": "548b8d1c58a1ced3",
    "W1": "839635f8dbbc2aed",
    "W2": "0b6ea3589532a8d5",
    "W3": "7d38be8b006e44b7",
}


def test_the_workloads_are_those_of_the_comparison_to_the_token():
    assert {name: digest(workload(name)) for name in DIGESTS} == DIGESTS
    assert set(WORKLOADS) == {*DIGESTS, "H1"}


def test_h1_is_the_first_200_prompts_of_w2_with_180_tokens_each():
    brief, mixed = workload("H1"), workload("W2")
    assert [request.prompt for request in brief] == [request.prompt for request in mixed[:200]]
    assert {request.output_len for request in brief} == {180}
    assert workload("H1", limit=3) == brief[:3]
    assert len(workload("H1", limit=1000)) == 200


def test_the_flags_name_every_workload():
    assert set(WORKLOAD_NAMES) == set(WORKLOADS)


def test_a_repeat_has_the_same_lengths_and_other_tokens():
    for draw in (workload, lambda name, repeat=0: random_requests(8, 128, 256, 0, repeat)):
        first, second = draw("L8"), draw("L8", repeat=1)
        assert [(len(r.prompt), r.output_len) for r in first] == [(len(r.prompt), r.output_len) for r in second]
        assert digest(first) != digest(second)


def test_a_limit_takes_the_first_requests_as_they_are():
    assert workload("W2", limit=5) == workload("W2")[:5]


def test_ids_are_folded_only_where_the_vocabulary_is_smaller():
    requests = workload("L8")
    assert folded(requests, 100_000) == requests
    small = folded(requests, 320)
    assert max(max(request.prompt) for request in small) < 320
    assert [len(request.prompt) for request in small] == [len(request.prompt) for request in requests]
