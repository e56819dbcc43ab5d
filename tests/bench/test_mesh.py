import json

import pytest

from jaxllm.bench.args import MeshArgs
from jaxllm.config.errors import InputError
from jaxllm.environment import offer_virtual_devices

RUN = """
import sys
from jaxllm.cli import main
main(sys.argv[1:])
"""
SIZES = ("--max-model-len=64", "--num-gpu-blocks-override=16", "--max-num-batched-tokens=64", "--enforce-eager")
TRAFFIC = ("--num-prompts=4", "--input-len=8", "--output-len=4")


def test_shapes_are_data_by_tensor():
    assert MeshArgs(shapes="1x8, 2x4").sizes() == [(1, 8), (2, 4)]


@pytest.mark.parametrize("shapes", ["8", "2x", "0x2", "1x2x3", "axb", ""])
def test_what_is_no_shape_is_refused(shapes):
    with pytest.raises(InputError, match="write data x tensor, as in 1x8,2x4,8x1"):
        MeshArgs(shapes=shapes)


def test_virtual_devices_are_asked_for_unless_the_user_says_how_many():
    environment = {"XLA_FLAGS": "--xla_a=1"}
    offer_virtual_devices(environment, 4)
    assert environment["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=4"
    offer_virtual_devices(environment, 8)
    assert environment["XLA_FLAGS"].endswith("=4")
    alone: dict[str, str] = {}
    offer_virtual_devices(alone, 1)
    assert alone == {}


@pytest.mark.slow
def test_the_shapes_that_the_devices_allow_are_measured_and_their_collectives_counted(run_program, golden, tmp_path):
    file = tmp_path / "mesh.json"
    model = ("bench", "mesh", "--model", golden / "llama", "--load-format=dummy", *SIZES, *TRAFFIC)
    said = run_program(RUN, *model, "--shapes=1x1,1x2,2x1,2x4", f"--output-json={file}", num_devices=4)
    assert len([line for line in said.splitlines() if line.startswith("|")]) == 2 + 3
    told = json.loads(file.read_text())
    assert told["device"] == "4 x cpu (cpu)"
    one, tensor, data = told["results"]
    assert (one["collectives"], data["collectives"]) == ([], [])
    reduced = [each for each in tensor["collectives"] if each["kind"] == "all-reduce"]
    num_layers, width = 4, 64
    # Two for each layer and the embedding's, of 4 requests in float32.
    assert sum(each["number"] for each in reduced) == 2 * num_layers + 1
    assert {each["num_bytes"] for each in reduced} == {4 * width * 4}
    assert all(each["tokens_per_second"] > 0 for each in told["results"])
