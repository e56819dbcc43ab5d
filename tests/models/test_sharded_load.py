"""Shards hold what the head layout gives their rank of the checkpoint, and no byte of it is read twice for them."""

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxllm.models.forward import build_program
from jaxllm.models.loader import dummy_weights
from jaxllm.models.placement import EMPTY, numbers, plan_shard
from jaxllm.models.registry import find_family

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 66,  # four ranks have rows behind its end
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
}
CONFIGS = {
    "grouped": LLAMA,
    "mha": LLAMA | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "uneven": LLAMA | {"num_attention_heads": 9, "num_key_value_heads": 3},
    "qk_norm": LLAMA | {"architectures": ["Qwen3ForCausalLM"]},
    "norm_of_each_head": LLAMA | {"architectures": ["CohereForCausalLM"], "use_qk_norm": True, "attention_bias": True},
    "norm_of_all_heads": LLAMA | {"architectures": ["Olmo2ForCausalLM"]},
    "biased": LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 14, "num_key_value_heads": 2},
    "fused": LLAMA | {"architectures": ["Phi3ForCausalLM"]},
}
SHARDS = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
from jaxllm.models import loader
from jaxllm.models.checkpoint import safetensors_folder
from jaxllm.models.forward import build_program
from jaxllm.models.registry import find_family

read = []  # (first byte, byte behind the last)

def map_bytes(path, start, stop, original=safetensors_folder.map_bytes):
    read.append((start, stop))
    return original(path, start, stop)

def map_columns(path, start, rows, row_bytes, first, last, original=safetensors_folder.map_columns):
    read.extend((start + r * row_bytes + first, start + r * row_bytes + last) for r in range(rows))
    return original(path, start, rows, row_bytes, first, last)

class Expected:
    # Each parameter's slice of a rank, from tensors that are not fused, by the layout of the heads.
    def __init__(self, checkpoint, cfg):
        self.cfg, self.layout, self.tensors = cfg, cfg.heads, {}
        for name in checkpoint.names():
            self.tensors[name] = checkpoint.read(name, 0, checkpoint.shape(name)[0]).astype(np.float32)
        whole = cfg.unsplit()
        N, K, H = whole.num_q_heads, whole.num_kv_heads, whole.head_dim
        for name in [n for n in self.tensors if "qkv_proj" in n or "gate_up_proj" in n]:
            cuts = [N * H, (N + K) * H] if "qkv" in name else 2
            parts = ("q", "k", "v") if "qkv" in name else ("gate", "up")
            for part, values in zip(parts, np.split(self.tensors[name], cuts)):
                self.tensors[name.replace("qkv" if "qkv" in name else "gate_up", part)] = values

    def slots(self, rank):
        each = self.layout.num_slots // self.cfg.tensor
        return range(rank * each, (rank + 1) * each)

    def places(self, rank):
        group = self.layout.group
        return [n for s in self.slots(rank) for n in [*self.layout.q_heads(s), *[None] * group][:group]]

    def heads(self, values, heads):
        # Of [heads x H, ...] some heads; zeros where there is none.
        by_head = values.reshape(-1, self.cfg.head_dim, *values.shape[1:])
        return np.stack([by_head[0] * 0 if n is None else by_head[n] for n in heads])

    def qkv(self, layer, kind, rank):
        q, k, v = (self.tensors[f"model.layers.{layer}.self_attn.{x}_proj.{kind}"] for x in "qkv")
        keys = [self.layout.kv_head(s) for s in self.slots(rank)]
        q = self.heads(q, self.places(rank)).reshape(len(keys), -1, self.cfg.head_dim, *q.shape[1:])
        return np.concatenate([q, self.heads(k, keys)[:, None], self.heads(v, keys)[:, None]], axis=1)

    def ffn(self, values, rank):
        return np.split(values, self.cfg.tensor)[rank]

    def of(self, name, layer, rank):
        layered = f"model.layers.{layer}."
        attention, mlp = layered + "self_attn.", layered + "mlp."
        t = self.tensors
        match name:
            case "attention.qkv_proj": return np.moveaxis(self.qkv(layer, "weight", rank), -1, 0)
            case "attention.qkv_bias": return self.qkv(layer, "bias", rank)
            case "attention.o_proj": return self.heads(t[attention + "o_proj.weight"].T, self.places(rank))
            case "attention.o_bias": return t[attention + "o_proj.bias"]
            case "attention.q_norm.scale" | "attention.k_norm.scale":
                values = t[attention + name.split(".")[1] + ".weight"]
                if self.cfg.qk_norm == "head":
                    return values
                is_query = name.startswith("attention.q")
                heads = self.places(rank) if is_query else [self.layout.kv_head(s) for s in self.slots(rank)]
                return self.heads(values.ravel(), heads)
            case "mlp.gate_up_proj":
                return np.stack([self.ffn(t[f"{mlp}{x}_proj.weight"], rank).T for x in ("gate", "up")], axis=1)
            case "mlp.gate_up_bias": return np.stack([self.ffn(t[f"{mlp}{x}_proj.bias"], rank) for x in ("gate", "up")])
            case "mlp.down_proj": return self.ffn(t[mlp + "down_proj.weight"].T, rank)
            case "mlp.down_bias": return t[mlp + "down_proj.bias"]
            case "attention_norm.scale": return t[layered + "input_layernorm.weight"]
            case "post_attention_norm.scale": return t[layered + "post_attention_layernorm.weight"]
            case "post_mlp_norm.scale": return t[layered + "post_feedforward_layernorm.weight"]
            case "mlp_norm.scale": return t[layered + "post_attention_layernorm.weight"]

    def whole(self, path, rows):
        if path == ("head", "norm", "scale"):
            return self.tensors["model.norm.weight"]
        values = self.tensors["lm_head.weight" if path[0] == "head" else "model.embed_tokens.weight"]
        return np.pad(values, ((0, self.cfg.vocab_rows - len(values)), (0, 0)))[rows]

def check(checkpoint, tensor):
    family = find_family(checkpoint.config)[1]
    whole = family.configure(checkpoint.config)
    cfg = whole.split(tensor)
    program, rules = build_program(cfg, "scan"), AxisRules()
    devices = build_mesh(4 // tensor, tensor).devices.reshape(4 // tensor, 1, tensor)
    mesh = Mesh(devices, ("data", "other", "tensor"))  # two data ranks, and an axis that nothing is split over
    sharding = lambda spec: NamedSharding(mesh, rules.spec(*spec.stored_axes))
    read.clear()
    weights = loader.load_weights(program, checkpoint, family.pieces(whole), jnp.dtype("float32"), sharding, False)
    ranges = sorted(read)
    expected = Expected(checkpoint, cfg)
    for spec in program.params:
        array = weights
        for key in spec.path:
            array = array[key]
        assert array.sharding.is_equivalent_to(sharding(spec), array.ndim), spec.name
        for shard in array.addressable_shards:
            rank = int(np.argwhere(mesh.devices == shard.device)[0][-1])
            found = np.asarray(shard.data)
            if spec.path[0] != "layers":
                np.testing.assert_array_equal(found, expected.whole(spec.path, shard.index[0]), err_msg=spec.name)
                continue
            name = spec.name.removeprefix("layers.")
            for l in spec.layers:
                np.testing.assert_array_equal(found[l], expected.of(name, l, rank), err_msg=f"{spec.name} {l} {rank}")
    return cfg, ranges

safetensors_folder.map_bytes, safetensors_folder.map_columns = map_bytes, map_columns
for folder in sys.argv[1:]:
    checkpoint = safetensors_folder.SafetensorsFolder(Path(folder))
    stored = sum(int(np.prod(checkpoint.shape(n))) * checkpoint.dtype(n).itemsize for n in checkpoint.names())
    for tensor in (2, 4):
        cfg, ranges = check(checkpoint, tensor)
        if cfg.heads.replicas == 1:
            assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:])), "a byte is read twice"
            assert sum(end - start for start, end in ranges) == stored
        loader.CHUNK_BYTES = 3_000  # with four ranks, in parts
    loader.CHUNK_BYTES = 64 << 20
print("equal")
"""


@pytest.fixture
def write_checkpoint(tmp_path, make_golden, random_checkpoint, monkeypatch):
    def write(name):
        monkeypatch.setitem(make_golden.CONFIGS, name, CONFIGS[name])
        (tmp_path / name).mkdir()
        random_checkpoint(tmp_path / name, name)
        return tmp_path / name

    return write


def test_shards_of_two_and_four_ranks_equal_slices_of_the_unfused_weights(write_checkpoint, run_program):
    assert run_program(SHARDS, *map(write_checkpoint, CONFIGS), num_devices=4) == "equal\n"


def configured(name):
    family = find_family(CONFIGS[name])[1]
    return family, family.configure(CONFIGS[name])


def test_rows_of_a_padded_vocabulary_are_zeros_behind_its_end():
    family, cfg = configured("grouped")
    cfg = family.configure(CONFIGS["grouped"] | {"vocab_size": 65})
    (piece,) = family.pieces(cfg)["embedding.tokens"]
    split = cfg.split(4)
    rows, plans = split.vocab_rows // 4, []
    for rank in range(4):
        index = ((rank * rows, (rank + 1) * rows), (0, 32))
        plans.append(plan_shard((piece,), (split.vocab_rows, 32), ("vocab", "embed"), index, split))
    assert [plan.copies[0].run[:2] for plan in plans] == [(0, 17), (17, 34), (34, 51), (51, 65)]
    assert {plan.num_lanes for plan in plans} == {17}
    assert numbers(("vocab",), (68,), split)[0][-3:].tolist() == [EMPTY] * 3


@pytest.mark.parametrize("name", ["uneven", "biased", "norm_of_each_head"])
def test_dummy_weights_are_the_same_numbers_however_the_heads_are_laid_out(name):
    _, cfg = configured(name)
    split = cfg.split(4)
    layout, H, D = split.heads, cfg.head_dim, cfg.d_model
    assert layout is not None
    device = SingleDeviceSharding(jax.devices()[0])

    def made(config):
        program = build_program(config)
        program = program._replace(params=tuple(p for p in program.params if p.path[:2] == ("layers", "attention")))
        attention = dummy_weights(program, np.dtype("float32"), lambda spec: device, seed=3)["layers"]["attention"]
        return {key: np.asarray(value) for key, value in attention.items() if "norm" not in key}

    whole, laid_out = made(cfg), made(split)
    G = cfg.num_q_heads // cfg.num_kv_heads
    for slot in range(layout.num_slots):
        head, queries = layout.kv_head(slot), layout.q_heads(slot)
        for parameter in whole.keys() - {"o_proj", "o_bias"}:
            theirs, own = np.moveaxis(whole[parameter], -3, 0), np.moveaxis(laid_out[parameter], -3, 0)[slot]
            for place in range(layout.group + 2):
                n = queries[place] % G if place < len(queries) else None
                source = n if place < layout.group else G + place - layout.group
                wanted = 0 if head is None or source is None else theirs[head][..., source, :]
                np.testing.assert_array_equal(own[..., place, :], wanted)
        for place in range(layout.group):
            wanted = whole["o_proj"][:, queries[place]] if place < len(queries) else 0
            np.testing.assert_array_equal(laid_out["o_proj"][:, slot * layout.group + place], wanted)
    assert (np.abs(whole["qkv_proj"]) > 0).mean() > 0.99
    assert whole["o_proj"].shape[1:] == (cfg.num_q_heads, H, D)
