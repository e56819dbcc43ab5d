RESTORED = """
import sys
import jax, jax.numpy as jnp, numpy as np, tensorstore
from pathlib import Path
from jax.sharding import NamedSharding
from jaxllm.config.engine_args import engine_args
from jaxllm.engine.model_source import checkpoint_pieces, find_model
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
from jaxllm.models.forward import build_program
from jaxllm.models.loader import load_weights
from jaxllm.models.read_config import read_config
from jaxllm.terminal.convert import convert

model, output = sys.argv[1:]
convert(engine_args({"model": model, "use_tqdm_on_load": False}), Path(output))
files = sum(file.stat().st_size for file in Path(output, "weights").rglob("*") if file.is_file())

def bytes_read():
    found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])

def load(folder, mesh, separate):
    source = find_model(engine_args({"model": folder}))
    whole = read_config(source.family, source.hf_config)
    program = build_program(whole.split(mesh.shape["tensor"]), separate=separate)
    sharding = lambda spec: NamedSharding(mesh, AxisRules().spec(*spec.stored_axes))
    before = bytes_read()
    pieces = checkpoint_pieces(source.checkpoint, source.family, whole)
    weights = load_weights(program, source.checkpoint, pieces, jnp.dtype("float32"), sharding, False)
    return weights, bytes_read() - before

mesh = build_mesh(2, 2)
expected, _ = load(model, mesh, separate=False)
restored, read = load(output, mesh, separate=False)
assert abs(read - files) < 0.03 * files, (read, files)
for wanted, found in zip(jax.tree.leaves(expected), jax.tree.leaves(restored), strict=True):
    assert found.sharding == wanted.sharding
    for one, other in zip(wanted.addressable_shards, found.addressable_shards, strict=True):
        np.testing.assert_array_equal(np.asarray(one.data), np.asarray(other.data))
_, read = load(output, build_mesh(1, 4), separate=True)
assert abs(read - files) < 0.03 * files, (read, files)
print("equal")
"""


def test_any_mesh_restores_them_and_each_byte_is_read_once(
    tmp_path, make_golden, random_checkpoint, run_program, monkeypatch
):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1998, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32}
    monkeypatch.setitem(make_golden.CONFIGS, "larger", make_golden.CONFIGS["falcon3"] | sizes | heads)
    (tmp_path / "model").mkdir()
    random_checkpoint(tmp_path / "model", "larger")
    assert run_program(RESTORED, tmp_path / "model", tmp_path / "converted", num_devices=4).endswith("equal\n")
