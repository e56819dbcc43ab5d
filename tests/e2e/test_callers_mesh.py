"""The engine on a caller's mesh, in the caller's axis names and buffers, under the caller's set_mesh."""

import json

import pytest

OPTIONS = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 64, "max_num_seqs": 2, "enforce_eager": True}

PROGRAM = """
import json, sys
import jax, numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh
from jaxllm import LLM, AxisRules, SamplingParams, param_shardings
from jaxllm.models.decoder import Decoder

folder, options, prompt = map(json.loads, sys.argv[1:])
tensor = {"q_heads": "tp", "kv_heads": "tp", "ffn": "tp", "vocab": "tp"}
rules = AxisRules(batch="fsdp", kv_blocks="fsdp", **tensor)
grid = np.asarray(jax.devices()).reshape(2, 2)
mesh = Mesh(grid, ("tp", "fsdp"), axis_types=(AxisType.Explicit, AxisType.Explicit))
params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

def tokens(llm):
    (result,) = llm.generate([prompt], params, use_tqdm=False)
    return [result.weight_version, *result.outputs[0].token_ids]

def pointers(tree):
    return [[shard.data.unsafe_buffer_pointer() for shard in sorted(leaf.addressable_shards, key=lambda s: s.device.id)]
            for leaf in jax.tree.leaves(tree)]

with jax.set_mesh(mesh):
    alone = AxisRules(batch=None, kv_blocks=None, **tensor)  # the other axis is left alone: both of it do the same
    with LLM(folder, mesh=mesh, axis_rules=alone, **options) as llm:
        print(json.dumps(tokens(llm)))
        cfg, weights = llm.model_config, llm.apply_model(lambda tree: jax.tree.map(np.asarray, tree))
    decoder = nnx.eval_shape(lambda: Decoder(cfg, nnx.Rngs(0)))
    where = param_shardings(cfg, mesh, rules)
    layers = {l: jax.tree.map(lambda w: w[l], weights["layers"], is_leaf=lambda w: isinstance(w, dict) and 0 in w)
              for l in range(cfg.num_layers)}
    nnx.update(decoder, jax.device_put(weights | {"layers": layers}, where))
    mine = pointers(nnx.to_pure_dict(nnx.state(decoder)))
    with LLM(decoder, mesh=mesh, axis_rules=rules, **options) as llm:
        assert sorted(map(tuple, pointers(llm.apply_model(lambda tree: tree)))) == sorted(map(tuple, mine))
        print(dict(llm.report())["weights held"])
        print(json.dumps(tokens(llm)))
        rolled = jax.tree.map(lambda w: jax.device_put(np.roll(np.asarray(w), 1, -1), w.sharding), nnx.state(decoder))
        llm.update_params(rolled, version="rolled")
        print(json.dumps(tokens(llm)))
        llm.update_params(decoder)
        print(json.dumps(tokens(llm)))
    assert jax.sharding.get_abstract_mesh() == mesh.abstract_mesh

# More ranks than KV heads: they are repeated.
layers = jax.tree.map(lambda *each: np.stack(each), *layers.values())
held = jax.device_put(weights | {"layers": layers}, param_shardings(cfg, mesh, rules, stacked=True))
with LLM((cfg, held), mesh=Mesh(grid.reshape(4), ("tensor",)), **options) as llm:
    print(dict(llm.report())["weights held"])
    print(json.dumps(tokens(llm)))
"""


@pytest.mark.slow
def test_an_engine_on_the_callers_mesh_and_buffers_gives_the_tokens_of_one_device(golden, golden_cases, run_program):
    case = golden_cases("llama")[3]
    given = (str(golden / "llama"), OPTIONS, case["prompt_ids"])
    printed = run_program(PROGRAM, *map(json.dumps, given), num_devices=4).splitlines()
    by_path, held, by_decoder, rolled, again, laid_out, by_weights = printed
    assert json.loads(by_path) == json.loads(by_decoder) == json.loads(by_weights) == [0, *case["output_ids"][:6]]
    assert held.endswith("used in place, 0 bytes copied")
    assert laid_out.startswith("9.0 KiB used in place, ")  # the nine norms, on four devices
    assert "from other devices" in laid_out
    assert json.loads(rolled)[0] == "rolled"
    assert json.loads(rolled)[1:] != case["output_ids"][:6]
    assert json.loads(again) == [2, *case["output_ids"][:6]]
