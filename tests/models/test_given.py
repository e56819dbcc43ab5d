"""Parameters that a program holds, in any tree in which layers are kept, become the arrays that a decoder takes."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxllm import AxisRules, param_shardings
from jaxllm.config.errors import InputError
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.forward import build_program, weights_tree
from jaxllm.models.given import GivenModel, arrange, collect, given_model
from jaxllm.models.rope import RopeConfig

CFG = ModelConfig(
    architecture="Tiny",
    vocab_size=16,
    d_model=8,
    d_ff=12,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position=32,
    layer_kinds=(LayerKind(), LayerKind()),
    ropes=(RopeConfig(theta=1e4, dim=4),),
    norm_eps=1e-6,
    attention_scale=0.5,
)


@dataclass(frozen=True)
class FakeDevice:
    """Stands in for a device: a mesh only lays it out."""

    id: int
    platform: str = "gpu"
    process_index: int = 0


@pytest.fixture(scope="module")
def decoder():
    made, rng = nnx.eval_shape(lambda: Decoder(CFG, nnx.Rngs(0))), np.random.default_rng(0)
    tree = nnx.to_pure_dict(nnx.state(made))
    nnx.update(made, jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), jnp.float32), tree))
    return made


def stacked_tree(decoder):
    tree = nnx.to_pure_dict(nnx.state(decoder))
    layers = jax.tree.map(lambda *each: jnp.stack(each), *(tree["layers"][l] for l in range(2)))
    return tree | {"layers": layers}


def forms(decoder):
    tree = nnx.to_pure_dict(nnx.state(decoder))
    layers = tree["layers"]
    return {
        "module": decoder,
        "state": nnx.state(decoder),
        "variables": tree | {"embedding": {"tokens": decoder.embedding.tokens}},
        "by number": tree,
        "by text": tree | {"layers": {str(l): layer for l, layer in layers.items()}},  # as orbax restores it
        "tuple": tree | {"layers": (layers[0], layers[1])},
        "stacked": stacked_tree(decoder),
        "numpy": jax.tree.map(np.asarray, tree),
    }


@pytest.mark.parametrize("layout", [{}, {"separate": True}, {"by_layer": True}])
def test_every_form_becomes_every_layout(decoder, layout):
    program, expected = build_program(CFG, **layout), None
    for name, form in forms(decoder).items():
        arranged = arrange(collect(form), program)
        assert [tuple(a.shape) for a in arranged.arrays] == [spec.stored_shape for spec in program.params], name
        numbers = [np.asarray(a) for a in arranged.arrays]
        expected = expected or numbers
        assert all((a == b).all() for a, b in zip(numbers, expected, strict=True)), name
        made = {spec.name for spec, is_new in zip(program.params, arranged.is_new, strict=True) if is_new}
        is_kept = name == "stacked" if not layout else name != "stacked" and "by_layer" in layout
        assert (made == set()) == is_kept, name


def test_the_layout_of_a_given_model_takes_its_arrays_as_they_are(decoder):
    for form in (decoder, stacked_tree(decoder)):
        model = given_model(form) if form is decoder else given_model((CFG, form))
        program = model.build_program(CFG)
        assert not any(arrange(model.params, program).is_new)
        assert isinstance(weights_tree({spec.path: 0 for spec in program.params})["layers"], tuple) == (form is decoder)
    one = GivenModel(CFG, collect(decoder))
    assert one.dtype == "float32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["head"].pop("proj"), "weights: head.proj is missing"),
        (lambda tree: tree["layers"].pop(1), "weights: layers.1.attention.o_proj is missing"),
        (lambda tree: tree.update(extra=np.zeros(3)), "weights: extra is not expected"),
        (lambda tree: tree["layers"].update({2: tree["layers"][1]}), "is not expected: the model has 2 layers"),
        (
            lambda tree: tree["layers"][1]["mlp"].update(down_proj=jnp.zeros((8, 12))),
            "weights: layers.1.mlp.down_proj must be floats[12, 8], got float32[8, 12]",
        ),
        (
            lambda tree: tree["head"].update(proj=np.zeros((16, 8), np.int8)),
            "head.proj must be floats[16, 8], got int8",
        ),
        (lambda tree: tree["head"].update(proj="x"), "weights: head.proj must be arrays, got str"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(decoder, change, message):
    tree = nnx.to_pure_dict(nnx.state(decoder))
    change(tree)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        arrange(collect(tree), build_program(CFG))
    assert "\n" not in str(caught.value)


def test_arrays_that_are_gone_are_told_from_others(decoder):
    tree = nnx.to_pure_dict(nnx.state(decoder))
    gone = tree["head"]["proj"] + 1
    gone.delete()
    tree["head"]["proj"] = gone
    with pytest.raises(InputError, match=r"weights: head\.proj was donated or deleted by the program that held it"):
        arrange(collect(tree), build_program(CFG))


def test_a_type_may_be_asked_for(decoder):
    with pytest.raises(InputError, match=r"must be bfloat16\[.*got float32"):
        arrange(collect(decoder), build_program(CFG), jnp.dtype("bfloat16"))


@pytest.mark.parametrize("model", [3, (CFG,), ("llama", {}), {"embedding": 0}])
def test_anything_else_is_no_model(model):
    with pytest.raises(InputError, match="model must be a name, folder or file, a "):
        given_model(model)


def test_shardings_are_said_in_the_callers_names_and_what_is_to_be_laid_out_is_whole():
    devices = np.asarray([FakeDevice(i) for i in range(4)])
    mesh = Mesh(devices.reshape(1, 4), ("fsdp", "tp"))
    rules = AxisRules("fsdp", "fsdp", "tp", "tp", "tp", "tp")
    tree = param_shardings(CFG, mesh, rules)
    assert list(tree["layers"]) == [0, 1]
    layer = tree["layers"][1]
    assert layer["mlp"]["gate_up_proj"].spec == PartitionSpec(None, None, "tp")
    assert layer["attention"]["qkv_proj"].spec == PartitionSpec()  # 2 KV heads on 4 ranks
    assert layer["attention"]["o_proj"].spec == PartitionSpec("tp", None, None)  # 4 query heads
    assert tree["head"]["proj"].spec == PartitionSpec("tp", None)
    half = Mesh(devices[:2].reshape(2, 1), ("tp", "fsdp"))
    stacked = param_shardings(CFG, half, rules, stacked=True)
    assert stacked["layers"]["attention"]["qkv_proj"].spec == PartitionSpec(None, None, "tp", None, None)
    with pytest.raises(InputError, match="the mesh has the axes fsdp, tp, neither data nor tensor"):
        param_shardings(CFG, mesh)
