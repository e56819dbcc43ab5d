import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors import safe_open

from jaxllm.config.errors import InputError
from jaxllm.models import loader
from jaxllm.models.checkpoint.safetensors_folder import SafetensorsFolder
from jaxllm.models.family import Piece
from jaxllm.models.forward import build_program
from jaxllm.models.loader import check_tensors, dummy_weights, load_weights
from jaxllm.models.placement import Copy, Run, ShardPlan
from jaxllm.models.registry import find_family


class ArrayCheckpoint:
    """A checkpoint in memory, to take tensors away from, and that counts the rows it gives."""

    format = "safetensors"

    def __init__(self, folder: Path):
        opened = SafetensorsFolder(folder)
        self.generation_config = {}
        self.path, self.config = Path("model"), opened.config
        self.tensors = {name: opened.read(name, 0, opened.shape(name)[0]) for name in opened.names()}
        self.largest_read = 0

    def names(self):
        return self.tensors

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype

    def read(self, name, start, stop, columns=None):
        rows = self.tensors[name][start:stop] if columns is None else self.tensors[name][start:stop, slice(*columns)]
        self.largest_read = max(self.largest_read, rows.nbytes)
        return rows

    def tokenizer_fields(self):
        return None


def prepare(checkpoint):
    _, family = find_family(checkpoint.config)
    cfg = family.configure(checkpoint.config)
    return build_program(cfg, "scan"), family.pieces(cfg)


def on_one_device(spec):
    return SingleDeviceSharding(jax.devices()[0])


def load(checkpoint, dtype=jnp.float32):
    program, pieces = prepare(checkpoint)
    return load_weights(program, checkpoint, pieces, jnp.dtype(dtype), on_one_device, progress=False)


def flat(weights):
    return {".".join(k.key for k in path): np.asarray(v) for path, v in jax.tree_util.tree_leaves_with_path(weights)}


def hugging_face_tensors(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            tensors |= {name: opened.get_tensor(name).astype(np.float32) for name in opened.keys()}  # noqa: SIM118
    return tensors


def placed_by_hand(tensors, cfg):
    """The layout, said once more: head by head, row by row."""
    D, F, N, K, H, L = cfg.d_model, cfg.d_ff, cfg.num_q_heads, cfg.num_kv_heads, cfg.head_dim, cfg.num_layers
    G = N // K
    expected = {
        "layers.attention.qkv_proj": np.zeros((L, D, K, G + 2, H), np.float32),
        "layers.attention.o_proj": np.zeros((L, N, H, D), np.float32),
        "layers.mlp.gate_up_proj": np.zeros((L, D, 2, F), np.float32),
        "layers.mlp.down_proj": np.zeros((L, F, D), np.float32),
        "embedding.tokens": tensors["model.embed_tokens.weight"],
        "head.norm.scale": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        expected["head.proj"] = tensors["lm_head.weight"]
    for l in range(L):
        q, k, v, o = (tensors[f"model.layers.{l}.self_attn.{name}_proj.weight"] for name in "qkvo")
        qkv_proj = expected["layers.attention.qkv_proj"][l]
        for n in range(N):
            qkv_proj[:, n // G, n % G] = q[n * H : (n + 1) * H].T
            expected["layers.attention.o_proj"][l, n] = o[:, n * H : (n + 1) * H].T
        for j in range(K):
            qkv_proj[:, j, G] = k[j * H : (j + 1) * H].T
            qkv_proj[:, j, G + 1] = v[j * H : (j + 1) * H].T
        gate, up, down = (tensors[f"model.layers.{l}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        expected["layers.mlp.gate_up_proj"][l, :, 0] = gate.T
        expected["layers.mlp.gate_up_proj"][l, :, 1] = up.T
        expected["layers.mlp.down_proj"][l] = down.T
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if cfg.post_norms:
        norms |= {"post_attention_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm"}
        norms |= {"post_mlp_norm": "post_feedforward_layernorm"}
        norms |= {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
    for ours, theirs in norms.items():
        expected[f"layers.{ours}.scale"] = np.stack([tensors[f"model.layers.{l}.{theirs}.weight"] for l in range(L)])
    return expected


@pytest.mark.parametrize("name", ["llama_fp16_sharded", "gemma3_text"])
def test_every_parameter_is_its_tensor_in_its_place(golden, name):
    checkpoint = SafetensorsFolder(golden / name)
    weights = flat(load(checkpoint))
    expected = placed_by_hand(hugging_face_tensors(golden / name), prepare(checkpoint)[0].cfg)
    assert set(weights) == set(expected)
    for parameter, values in expected.items():
        assert weights[parameter].dtype == np.float32
        np.testing.assert_array_equal(weights[parameter], values, err_msg=parameter)


# Bytes: 1 is a row at a time, 3,400 part of a head, 6,000 a line of 16-row heads, 20,000 more than one KV head's part.
@pytest.mark.parametrize("chunk_bytes", [1, 3_400, 6_000, 20_000])
def test_chunks_of_any_size_give_the_same(golden, monkeypatch, chunk_bytes):
    checkpoint = ArrayCheckpoint(golden / "llama")
    # Two layers will do.
    checkpoint.config["num_hidden_layers"] = 2
    checkpoint.tensors = {k: v for k, v in checkpoint.tensors.items() if not re.search(r"layers\.[23]\.", k)}
    if chunk_bytes == 1:  # row by row takes thousands of steps: one layer, few rows
        checkpoint.config["num_hidden_layers"] = 1
        checkpoint.tensors = {k: v for k, v in checkpoint.tensors.items() if "layers.1." not in k}
    whole = flat(load(checkpoint))
    assert checkpoint.largest_read > 20_000
    checkpoint.largest_read = 0
    monkeypatch.setattr(loader, "CHUNK_BYTES", chunk_bytes)
    chunked = flat(load(checkpoint))
    widest_row = max(array[0].nbytes for array in checkpoint.tensors.values())
    assert checkpoint.largest_read <= max(chunk_bytes, widest_row)
    for parameter, values in whole.items():
        np.testing.assert_array_equal(chunked[parameter], values, err_msg=parameter)


def test_chunks_cover_every_lane_once_and_end_where_copies_do(monkeypatch):
    piece, whole = Piece("some.weight", (64, 10)), (Run(0, 10, 0),)
    for bounds, fitting, expected in [
        ((0, 32, 64), 5, [*range(5, 32, 5), 32, *range(37, 64, 5), 64]),
        ((0, 32, 64), 40, [32, 64]),
        ((0, 16, 32, 64), 40, [32, 64]),
        ((0, 16, 64), 20, [16, 36, 56, 64]),
        ((0, 64), 64, [64]),
    ]:
        monkeypatch.setattr(loader, "CHUNK_BYTES", fitting * 4 * 10 + 3)
        copies = [Copy(piece, Run(first, end, first)) for first, end in itertools.pairwise(bounds)]
        chunks = loader._chunks(ShardPlan(1, 64, 10, tuple(copies), whole), np.dtype(np.float32))
        assert [first for first, _ in chunks] == [0, *[end for _, end in chunks[:-1]]]
        assert [end for _, end in chunks] == expected


@pytest.mark.parametrize("name", ["llama_fp16_sharded", "gemma3_text"])
def test_separate_matrices_hold_what_the_stacked_ones_do(golden, name):
    checkpoint = ArrayCheckpoint(golden / name)
    stacked = flat(load(checkpoint))
    program, pieces = prepare(checkpoint)
    program = build_program(program.cfg, separate=True)
    weights = load_weights(program, checkpoint, pieces, jnp.dtype(jnp.float32), on_one_device, progress=False)
    separate = {tuple(k.key for k in path): v for path, v in jax.tree_util.tree_leaves_with_path(weights)}
    assert len(separate) == len(stacked) + 4 * (program.cfg.num_layers - 1)  # qkv, o, gate_up, down
    for path, value in separate.items():
        whole = stacked[".".join(key for key in path if isinstance(key, str))]
        np.testing.assert_array_equal(value, whole[path[-1]] if isinstance(path[-1], int) else whole)


def test_weights_take_the_type_asked_for(golden):
    checkpoint = ArrayCheckpoint(golden / "llama_fp16_sharded")
    weights = flat(load(checkpoint, jnp.bfloat16))
    assert {str(array.dtype) for array in weights.values()} == {"bfloat16"}
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(weights["embedding.tokens"], embedding.astype(weights["embedding.tokens"].dtype))


def refusal(checkpoint):
    with pytest.raises(InputError) as raised:
        load(checkpoint)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_missing_tensors_are_named_with_their_shapes(golden):
    checkpoint = ArrayCheckpoint(golden / "llama")
    del checkpoint.tensors["model.layers.2.self_attn.k_proj.weight"]
    assert refusal(checkpoint) == "model: 1 missing tensor(s): model.layers.2.self_attn.k_proj.weight (32, 64)"
    checkpoint.tensors = {name: array for name, array in checkpoint.tensors.items() if "layers.3" not in name}
    message = refusal(checkpoint)
    assert message.startswith("model: 10 missing tensor(s): ")
    assert message.endswith(" and 6 more")


def test_tensors_of_another_shape_are_named_with_both_shapes(golden):
    checkpoint = ArrayCheckpoint(golden / "llama")
    checkpoint.tensors["lm_head.weight"] = np.zeros((321, 64), np.float32)
    expected = "model: 1 mis-shaped tensor(s): lm_head.weight is (321, 64), the configuration says (320, 64)"
    assert refusal(checkpoint) == expected


def test_tensors_that_nothing_uses_are_named(golden):
    checkpoint = ArrayCheckpoint(golden / "llama")
    bias = "model.layers.0.self_attn.q_proj.bias"
    checkpoint.tensors[bias] = np.zeros(64, np.float32)
    assert refusal(checkpoint) == f"model: 1 tensor(s) that the configuration does not use: {bias} (64,)"


def test_harmless_extra_tensors_are_passed_over(golden):
    checkpoint = ArrayCheckpoint(golden / "llama_tied")
    program, pieces = prepare(checkpoint)
    checkpoint.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"]
    check_tensors(checkpoint, pieces, program.cfg.num_layers, tied=True)
    with pytest.raises(InputError, match=r"does not use: lm_head\.weight"):
        check_tensors(checkpoint, pieces, program.cfg.num_layers, tied=False)


def test_dummy_weights_have_the_real_shapes_and_norms_scale_by_one(golden):
    program, _ = prepare(SafetensorsFolder(golden / "gemma3_text"))
    # Each matrix takes a second to compile its random numbers: one with few axes, one with many.
    matrices = ("embedding.tokens", "layers.attention.qkv_proj")
    program = program._replace(params=tuple(p for p in program.params if p.name in matrices or len(p.shape) == 1))
    weights = flat(dummy_weights(program, jnp.dtype(jnp.bfloat16), on_one_device, seed=3))
    assert {spec.name: spec.stored_shape for spec in program.params} == {k: v.shape for k, v in weights.items()}
    assert len(weights) == 2 + 7
    for parameter, values in weights.items():
        assert values.dtype == jnp.bfloat16
        if parameter not in matrices:
            assert (values.astype(np.float32) + program.cfg.norm_offset == 1.0).all()
        else:
            assert 0.005 < values.astype(np.float32).std() < 0.05


def test_dummy_weights_are_those_of_their_seed(golden):
    program, _ = prepare(SafetensorsFolder(golden / "gemma3_text"))
    program = program._replace(params=tuple(p for p in program.params if p.name == "embedding.tokens"))
    first, again, other = (
        flat(dummy_weights(program, jnp.dtype(jnp.float32), on_one_device, seed))["embedding.tokens"]
        for seed in (3, 3, 50)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.99


MEASURED_LOAD = """
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxllm.models.checkpoint.resolve import open_checkpoint
from jaxllm.models.forward import build_program
from jaxllm.models.loader import load_weights
from jaxllm.models.registry import find_family

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

checkpoint = open_checkpoint("smollm2")
_, family = find_family(checkpoint.config)
cfg = family.configure(checkpoint.config)
program = build_program(cfg, "scan")
device = SingleDeviceSharding(jax.devices()[0])
jax.block_until_ready(jnp.zeros(1))
before = peak()
weights = load_weights(program, checkpoint, family.pieces(cfg), jnp.dtype("float32"), lambda spec: device, False)
leaves = jax.tree.leaves(weights)
assert sum(leaf.size for leaf in leaves) > 130e6
print(peak() - before, sum(leaf.nbytes for leaf in leaves), max(leaf.nbytes for leaf in leaves))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_load_takes_the_weights_and_little_more(run_program):
    growth, weights, largest = map(int, run_program(MEASURED_LOAD).split())
    assert growth <= weights + largest + (300 << 20), f"{growth >> 20} MiB for {weights >> 20} MiB of weights"
