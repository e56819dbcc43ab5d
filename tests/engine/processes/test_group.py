"""What processes must have in common, and what they need not."""

import pytest

from jaxllm.config.engine_args import engine_args
from jaxllm.config.errors import InputError
from jaxllm.engine.processes.group import common_flags, comparable


def test_flags_of_a_host_are_not_compared():
    one = common_flags(engine_args({"model": "/a/llama", "nnodes": 2, "master_addr": "h", "hf_token": "secret"}))
    two = common_flags(engine_args({"model": "/b/llama", "nnodes": 2, "node_rank": 1, "master_addr": "h"}))
    assert one == two
    assert "secret" not in str(one)
    assert one["max_num_seqs"] == "None"


def test_the_number_of_virtual_devices_may_differ_but_no_other_flag_of_xla():
    flags = "--xla_force_host_platform_device_count=2 --xla_x=1"
    assert comparable({"XLA_FLAGS": flags, "blocks": "3", "dtype": "a"}) == {"XLA_FLAGS": "--xla_x=1", "dtype": "a"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2, "node_rank": 2, "master_addr": "h"}, "node_rank=2 is out of range: nnodes=2 counts from 0"),
        ({"node_rank": 1}, "node_rank=1 is out of range: nnodes=1 counts from 0"),
        ({"nnodes": 2}, "nnodes=2 needs master_addr, the name or address of the host of process 0"),
        ({"nnodes": 2, "master_addr": "h", "master_port": 65535}, "master_port must be at most 65534, got 65535"),
    ],
)
def test_flags_that_cannot_be_are_told(options: dict, message: str):
    with pytest.raises(InputError) as told:
        engine_args(options)
    assert str(told.value) == message
