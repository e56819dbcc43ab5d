"""A caller's parameters are laid out for tensor ranks just as those that the engine makes itself."""

import pytest

LAID_OUT = """
import jax, jax.numpy as jnp, numpy as np
from jaxllm.engine.given_weights import take_weights
from jaxllm.engine.step import StepProgram
from jaxllm.kernels.select import select
from jaxllm.mesh.axes import AxisRules
from jaxllm.mesh.build import build_mesh
from jaxllm.models.config import LayerKind, ModelConfig
from jaxllm.models.forward import build_program
from jaxllm.models.given import collect
from jaxllm.models.loader import dummy_weights
from jaxllm.models.rope import RopeConfig
from jaxllm.models.step_context import Kernels

cfg = ModelConfig(
    architecture="Tiny", vocab_size=30, d_model=8, d_ff=12, num_q_heads=9, num_kv_heads=3, head_dim=4, max_position=32,
    layer_kinds=(LayerKind(),), ropes=(RopeConfig(theta=1e4, dim=4),), norm_eps=1e-6, attention_scale=0.5,
    qkv_bias=True,
)
kernels = Kernels(*(select(name, platform="cpu") for name in Kernels._fields))

def made(ranks):
    program = StepProgram(build_program(cfg.split(ranks)), kernels, build_mesh(1, ranks), AxisRules(), 16)
    split = lambda spec: program.sharding(program.rules.spec(*spec.stored_axes))
    return program, dummy_weights(program.decoder, jnp.dtype("float32"), split)

program, expected = made(4)
taken = take_weights(program, collect(made(1)[1]))
jax.tree.map(np.testing.assert_array_equal, taken.tree, expected)
assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, taken.tree, expected)))
again = take_weights(program, collect(taken.tree))
assert (again.copied, again.moved, again.in_place) == (0, 0, taken.copied + taken.in_place)
print(program.decoder.cfg.num_kv_heads, taken.moved > 0)
"""


@pytest.mark.slow
def test_heads_and_vocabulary_are_laid_out_as_in_weights_made_for_the_ranks(run_program):
    assert run_program(LAID_OUT, num_devices=4).split() == ["4", "True"]
