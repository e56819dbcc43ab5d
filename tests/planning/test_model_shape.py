"""A plan's bytes are those of a start."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.errors import InputError
from jaxllm.engine.build import prepare
from jaxllm.engine.memory import plan_memory, temporaries_bound
from jaxllm.engine.model_source import find_model
from jaxllm.mesh.build import build_mesh
from jaxllm.mesh.planner import PROCESS_SHARE, Limits, MeshShape, Traffic, memory_use
from jaxllm.planning.devices import find_devices
from jaxllm.planning.model_shape import find_config, read_model, shape_of

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDENS = sorted(path.parent for path in GOLDEN.glob("*/config.json"))
NAMED = ["smollm2", "gemma3-270m", "llama-3.1-8b", "qwen3-0.6b", "llama-3.1-70b"]
TRAFFIC = Traffic(input_len=16, output_len=16)


@dataclasses.dataclass
class FakeDevice:
    """Stands in for a GPU: says how much memory it has."""

    bytes_limit: int
    platform: str = "gpu"

    def memory_stats(self):
        return {"bytes_limit": self.bytes_limit, "bytes_in_use": 0}


@pytest.mark.parametrize("model", [*NAMED, *GOLDENS], ids=lambda model: getattr(model, "name", model))
def test_a_plan_has_the_bytes_of_the_start_up_table(model):
    is_shape = model in NAMED[2:]
    args = EngineArgs(model=str(model), dtype="bfloat16", load_format="dummy" if is_shape else "auto")
    prepared = prepare(args, find_model(args), build_mesh(1, 1, jax.devices()[:1]))
    _, device = find_devices("4xH200")  # whose pool a tenth of the 70B's weights would not fit
    device = dataclasses.replace(device, memory_bytes=2 * device.memory_bytes)
    start = plan_memory(
        args,
        prepared.model,
        [FakeDevice(int(device.memory_bytes * PROCESS_SHARE))],  # pyright: ignore[reportArgumentType]
        chunk=8192,
        weights=prepared.memory.weights,
        temporaries=temporaries_bound(prepared.model, 8192, 256),
    )
    planned = memory_use(shape_of(read_model(str(model)), str(model)), device, MeshShape(1, 1), TRAFFIC, Limits())
    assert planned.weights == pytest.approx(start.weights, rel=0.01)
    assert planned.temporaries == pytest.approx(start.temporaries, rel=0.01)
    assert planned.pool == pytest.approx(start.pool, rel=0.01)
    assert planned.block_bytes == start.block_bytes
    assert planned.num_tokens == pytest.approx(start.num_tokens, rel=0.01)


RANKS = """
import sys
tensor = int(sys.argv[1])
from jaxllm.config.engine_args import EngineArgs
from jaxllm.engine.build import prepare
from jaxllm.engine.model_source import find_model
from jaxllm.mesh.build import build_mesh
from jaxllm.planning.model_shape import read_model, shape_of
for model in sys.argv[2:]:
    load_format = "dummy" if model.startswith("llama-") else "auto"
    args = EngineArgs(model=model, dtype="bfloat16", load_format=load_format, tensor_parallel_size=tensor)
    memory = prepare(args, find_model(args), build_mesh(1, tensor)).memory
    shape = shape_of(read_model(model), model, [tensor])
    shard = shape.shards[tensor]
    weights = shape.num_layers * shard.layer_bytes + shard.embedding_bytes + shard.head_bytes
    print(memory.weights, weights, memory.block_bytes, 16 * shard.kv_slot_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 4])
def test_so_it_has_on_tensor_ranks_with_heads_that_are_repeated_or_empty(run_program, tensor):
    names = ("qwen2", "gemma2", "phi3", "olmo2", "cohere")
    models = ["llama-3.1-8b", "smollm2", *(str(GOLDEN / name) for name in names)]
    lines = run_program(RANKS, tensor, *models, num_devices=tensor).splitlines()
    assert len(lines) == len(models)
    for line in lines:
        weights, planned, block, planned_block = map(float, line.split())
        assert planned == pytest.approx(weights, rel=0.01)
        assert planned_block == block


def test_a_model_is_found_by_name_folder_and_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(find_config("llama-3.1-70b")))
    by_name = read_model("llama-3.1-70b")
    assert read_model(str(tmp_path)) == read_model(str(tmp_path / "config.json")) == by_name
    assert by_name.dtype == "bfloat16"
    assert read_model("llama-3.1-70b", "float16").dtype == "float16"
    assert read_model("llama-3.1-70b", overrides={"num_hidden_layers": 40}).num_layers == 40
    with pytest.raises(InputError, match="neither a folder nor a file here, nor a hub id"):
        read_model("llama-3.1-71b")
    with pytest.raises(InputError, match="dtype='int4' is not known"):
        read_model("smollm2", "int4")


def test_an_8_bit_cache_takes_half_and_ranks_that_cannot_be_are_named():
    cfg = read_model("llama-3.1-8b")
    whole, half = (shape_of(cfg, "8b", [1, 2, 3], kv).shards for kv in ("auto", "fp8"))
    assert half[1].kv_slot_bytes * 2 == whole[1].kv_slot_bytes == 131_072
    assert 3 in shape_of(cfg, "8b", [3]).refused
    with pytest.raises(InputError, match="kv_cache_dtype='int4'"):
        shape_of(cfg, "8b", kv_cache_dtype="int4")
