from jaxllm.bench.workloads import WORKLOADS, digest, workload

DIGESTS = {
    "L1": "7aeb40c0dbac2c7f",
    "L8": "548b8d1c58a1ced3",
    "W1": "839635f8dbbc2aed",
    "W2": "0b6ea3589532a8d5",
    "W3": "7d38be8b006e44b7",
}


def test_the_workloads_are_those_of_the_comparison_to_the_token():
    digests = {name: digest(workload(name)) for name in WORKLOADS}
    assert digests == DIGESTS


def test_a_repeat_has_the_same_lengths_and_other_tokens():
    first, second = workload("L8"), workload("L8", repeat=1)
    assert [(len(r.prompt), r.output_len) for r in first] == [(len(r.prompt), r.output_len) for r in second]
    assert digest(first) != digest(second)
