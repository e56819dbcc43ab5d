import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding

from jaxllm.kernels.fused_linear import reference as fused
from jaxllm.kernels.matmul import reference
from jaxllm.kernels.select import select
from jaxllm.mesh.build import build_mesh
from jaxllm.models.checkpoint.safetensors_folder import SafetensorsFolder
from jaxllm.models.forward import build_program, project, rope_tables, run_layers, weights_tree
from jaxllm.models.loader import load_weights
from jaxllm.models.registry import find_family
from jaxllm.models.step_context import Kernels, StepContext

BLOCK_SIZE = 8
KERNELS = Kernels(*(select(name, platform="cpu") for name in Kernels._fields))


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request, golden):
    """A family's name, its program and its weights, stacked."""
    checkpoint = SafetensorsFolder(golden / request.param)
    _, family = find_family(checkpoint.config)
    cfg = family.configure(checkpoint.config)
    program = build_program(cfg, "scan")
    device = SingleDeviceSharding(jax.devices()[0])
    pieces = family.pieces(cfg)
    weights = load_weights(program, checkpoint, pieces, jnp.dtype("float32"), lambda spec: device, progress=False)
    return request.param, program, weights


@pytest.fixture(scope="module")
def case(model, golden):
    """The golden prompt of 33 tokens: longer than the sliding window of 16, not a multiple of any block."""
    cases = json.loads((golden / model[0] / "golden.json").read_text())["cases"]
    return next(case for case in cases if len(case["prompt_ids"]) == 33)


def step_context(cfg, num_cached, num_new):
    """Tokens num_cached..num_cached+num_new of one request, whose blocks are 1, 2, ... in each group."""
    num_groups, width = len(cfg.kv_layout.windows), -(-(num_cached + num_new) // BLOCK_SIZE)
    position = jnp.arange(num_cached, num_cached + num_new)
    table = 1 + jnp.arange(num_groups * width).reshape(num_groups, 1, width)
    cos, sin = rope_tables(cfg, position)
    return StepContext(
        cos=cos,
        sin=sin,
        write_block=table[:, 0, position // BLOCK_SIZE],
        write_offset=position % BLOCK_SIZE,
        block_table=table,
        query_start=jnp.asarray([0, num_new]),
        context_len=jnp.asarray([num_cached + num_new]),
    )


def empty_cache(cfg, num_blocks=40):
    shape = (cfg.kv_layout.layers_per_group, num_blocks, 2, cfg.num_kv_heads, BLOCK_SIZE, cfg.head_dim)
    return jnp.zeros(shape)


def forward(program, kernels=KERNELS):
    """Jits the model over a 1x1 mesh, as a step does: (weights, kv, tokens, step) -> (logits [T, V], kv)."""

    def logits(weights, kv, token_T, step):
        hidden_TD, kv = run_layers(program, kernels, weights, kv, token_T, step)
        return project(program, kernels, weights, hidden_TD), kv

    whole = PartitionSpec()
    return jax.jit(jax.shard_map(logits, mesh=build_mesh(), in_specs=whole, out_specs=whole, check_vma=False))


# Gemma 3 has the most that differs between layers: windows, ropes, groups. Each way takes seconds to compile.
@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
def test_all_ways_to_drive_the_layers_give_the_golden_logits(model, case):
    _, program, weights = model
    cfg, prompt = program.cfg, jnp.asarray(case["prompt_ids"])
    separate = tuple(jax.tree.map(lambda w, l=l: w[l], weights["layers"]) for l in range(cfg.num_layers))
    step = step_context(cfg, 0, len(prompt))
    scanned, scanned_kv = forward(program)(weights, empty_cache(cfg), prompt, step)
    assert scanned.dtype == jnp.float32
    np.testing.assert_allclose(scanned[-1], case["logits_first"], atol=1e-3, rtol=1e-3)
    unrolled = program._replace(loop="unroll")
    chosen = jax.tree.map(lambda w: dict(enumerate(w)) if w.ndim > 2 else w, weights["layers"])
    for other, theirs in (
        (unrolled, weights),
        (program, weights | {"layers": separate}),
        (program, weights | {"layers": chosen}),
        (unrolled, weights | {"layers": chosen}),
    ):
        logits, kv = forward(other)(theirs, empty_cache(cfg), prompt, step)
        np.testing.assert_allclose(logits, scanned, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(kv, scanned_kv, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", ["gemma3_text"], indirect=True)
@pytest.mark.parametrize("loop", ["scan", "unroll"])
def test_attention_plans_once_for_each_window_and_every_layer_gets_the_plan_of_its_own(model, loop, case):
    _, program, weights = model
    cfg, prompt = program.cfg, jnp.asarray(case["prompt_ids"])
    planned = []

    def plan_attention(kv_cache, query_start, context_len, *, window, **sizes):
        planned.append((window, sizes))
        return {"window": context_len[:1] * 0 + (1 << 30 if window is None else window)}

    def paged_attention(*arguments, window, plan, **options):
        return KERNELS.paged_attention(*arguments, window=plan["window"][0], **options)  # wrong with another's plan

    kernels = KERNELS._replace(plan_attention=plan_attention, paged_attention=paged_attention)
    step = step_context(cfg, 0, len(prompt))
    logits, _ = forward(program._replace(loop=loop), kernels)(weights, empty_cache(cfg), prompt, step)
    np.testing.assert_allclose(logits[-1], case["logits_first"], atol=1e-3, rtol=1e-3)
    width, group = step.block_table.shape[-1], cfg.num_q_heads // cfg.num_kv_heads
    sizes = {"num_tokens": len(prompt), "table_width": width, "group": group, "dtype": jnp.float32}
    assert planned == [(window, sizes) for window in dict.fromkeys(kind.window for kind in cfg.layer_kinds)]
    assert len(planned) == 2


# Gemma 3 normalises between a product and its residual, and queries and keys.
@pytest.mark.parametrize(("model", "loop"), [("llama", "unroll"), ("gemma3_text", "scan")], indirect=["model"])
def test_kernels_find_every_parameter_where_it_lies_among_those_of_all_layers(model, loop, case):
    calls = []

    def multiply(x, weight, *, transposed=False, stack=None):
        calls.append(("matmul", x.shape[0], weight.shape, stack is None))
        return reference.matmul(x, weight if stack is None else stack.matrices[stack.layer], transposed=transposed)

    def kernel(name):
        def call(x, *operands, stack, norm_stack=None, **options):
            weight, matrix = operands[1 if norm_stack else 0], stack.matrices[stack.layer]
            calls.append((name, x.shape[0], weight.shape, False))
            if norm_stack:
                return getattr(fused, name)(x, norm_stack.scales[norm_stack.layer], matrix, **options)
            return getattr(fused, name)(x, matrix, operands[1], **options)

        return call

    _, program, weights = model
    cfg, prompt = program.cfg, jnp.asarray(case["prompt_ids"])
    kernels = {name: kernel(name) for name in ("norm_linear", "norm_gated_linear", "linear_add")}
    run = forward(program._replace(loop=loop), KERNELS._replace(matmul=multiply, **kernels))
    logits, _ = run(weights, empty_cache(cfg), prompt, step_context(cfg, 0, len(prompt)))
    np.testing.assert_allclose(logits[-1], case["logits_first"], atol=1e-3, rtol=1e-3)
    D, F, H = cfg.d_model, cfg.d_ff, cfg.head_dim
    qkv, attended = (cfg.num_q_heads + 2 * cfg.num_kv_heads) * H, cfg.num_q_heads * H
    products = (
        ("norm_linear", D, qkv),
        ("linear_add", attended, D),
        ("norm_gated_linear", D, 2 * F),
        ("linear_add", F, D),
    )
    layer = [(name, 33, (inputs, outputs), False) for name, inputs, outputs in products]
    assert calls == [*layer, ("matmul", 33, (cfg.vocab_size, D), True)]  # layers of one kind are traced once


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_prompt_in_chunks_gives_the_same_as_at_once(model, case):
    _, program, weights = model
    cfg, prompt, run = program.cfg, jnp.asarray(case["prompt_ids"]), forward(program)
    kv, found = empty_cache(cfg), None
    table = step_context(cfg, 0, len(prompt)).block_table
    for start in range(0, 33, 11):
        step = step_context(cfg, start, 11)
        step = step._replace(block_table=table, write_block=table[:, 0, jnp.arange(start, start + 11) // BLOCK_SIZE])
        found, kv = run(weights, kv, prompt[start : start + 11], step)
    assert found is not None
    np.testing.assert_allclose(found[-1], case["logits_first"], atol=1e-3, rtol=1e-3)


def test_the_program_names_every_parameter_with_one_axis_per_dimension(model):
    _, program, weights = model
    for spec in program.params:
        assert len(spec.stored_axes) == len(spec.stored_shape)
        assert (spec.num_layers is None) == (spec.path[0] != "layers")
    shapes = weights_tree({spec.path: spec.stored_shape for spec in program.params})
    assert jax.tree.map(lambda w: w.shape, weights) == shapes


def test_rope_tables_are_those_of_each_rope_at_each_position(model):
    cfg = model[1].cfg
    positions = np.array([0, 1, 511])
    cos, sin = rope_tables(cfg, jnp.asarray(positions))
    assert cos.shape == (len(cfg.ropes), 3, cfg.head_dim // 2)
    for r, rope in enumerate(cfg.ropes):
        angles = positions[:, None] * rope.inv_freq().astype(np.float64)
        np.testing.assert_allclose(cos[r], np.cos(angles), atol=1e-4)
        np.testing.assert_allclose(sin[r], np.sin(angles), atol=1e-4)
