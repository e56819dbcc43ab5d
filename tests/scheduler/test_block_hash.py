from jaxllm.scheduler.block_hash import block_hashes, root_digest
from jaxllm.scheduler.request import Request


def test_equal_beginnings_have_equal_names_and_what_differs_changes_all_behind_it():
    a = block_hashes(Request("a", [1, 2, 3, 4, 5, 6, 7], 1), 3, 2)
    b = block_hashes(Request("b", [1, 2, 3, 9, 5, 6], 1), 3, 2)
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b)
    assert len(set(a)) == 3


def test_equal_blocks_in_different_places_have_different_names():
    assert len(set(block_hashes(Request("a", [1, 2, 1, 2, 1, 2], 1), 3, 2))) == 3


def test_salt_and_kv_key_are_in_every_name():
    variants = [(None, ()), ("", ()), ("x", ()), (None, ("x",)), ("x", ("y",)), ("x", ("y", "")), ("None", ())]
    requests = [Request("a", [1, 2], 1, cache_salt=salt, kv_key=kv_key) for salt, kv_key in variants]
    assert len({block_hashes(request, 1, 2)[0] for request in requests}) == len(variants)
    assert len({root_digest(*variant) for variant in variants}) == len(variants)


def test_a_block_may_hold_prompt_and_output_and_each_is_named_once():
    request = Request("a", [1, 2, 3], 9, output_ids=[4, 5, 6, 7, 8])
    first = list(block_hashes(request, 1, 2))
    assert block_hashes(request, 4, 2) is request.block_hashes
    assert request.block_hashes[:1] == first
    assert request.block_hashes == block_hashes(Request("b", [1, 2, 3, 4, 5, 6, 7, 8], 1), 4, 2)
    assert len(block_hashes(request, 2, 2)) == 4
