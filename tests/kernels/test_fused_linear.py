"""Fused products against their references and float64: the table, and the kernel (interpreter or GPU)."""

import importlib
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.fused_linear import choice, reference, tuned
from jaxllm.kernels.fused_linear.choice import Fused, FusedConfig, NormStack, choose, parse_table, read_table
from jaxllm.kernels.launch import device_kind, poisoned_results
from jaxllm.kernels.matmul.choice import Stack

L = 3
EPS = 1e-5
# Triton's interpreter takes bfloat16 for integers.
HALF = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float16
OPERATIONS = ("norm_linear", "norm_gated_linear", "linear_add")
SIZES = {
    "even": (128, 192),
    "odd_outputs": (128, 200),
    "odd_inputs": (168, 64),
    "one_tile": (32, 64),
}


def draw(rng, rows, inputs, outputs, dtype):
    """Rows, residual, and scales and matrices of all layers; whoever reads a layer beside the middle one finds NaN."""
    x = jnp.asarray(rng.normal(size=(rows, inputs)) * 3, dtype)
    residual = jnp.asarray(rng.normal(size=(rows, outputs)) * inputs**0.5, dtype)
    scales, weights = np.full((L, inputs), np.nan), np.full((L, inputs, outputs), np.nan)
    scales[1], weights[1] = 1 + 0.3 * rng.normal(size=inputs), rng.normal(size=weights.shape[1:])
    return x, residual, jnp.asarray(scales, dtype), jnp.asarray(weights, dtype)


def exact(operation, x, residual, scales, weights, offset=0.0, activation="silu"):
    x, residual, scale, weight = (np.asarray(a, np.float64) for a in (x, residual, scales[1], weights[1]))
    if operation == "linear_add":
        return residual + x @ weight
    out = (x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * (offset + scale)) @ weight
    if operation == "norm_linear":
        return out
    gate, up = np.split(out, 2, axis=1)
    return np.asarray(reference.ACTIVATIONS[activation](jnp.asarray(gate, jnp.float32)), np.float64) * up


def error(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


def call(module, operation, x, residual, scales, weights, layer, offset=0.0, activation="silu", config=()):
    """Calls a version, of a module with constants to give or of one with slices of the stacks."""
    norm_stack, stack = NormStack(scales, layer), Stack(weights, layer)
    options = {} if operation == "linear_add" else {"eps": EPS, "offset": offset}
    options |= {"activation": activation} if operation == "norm_gated_linear" else {}
    function = getattr(module, operation)
    if config:
        operands = (x, stack, residual) if operation == "linear_add" else (x, norm_stack, stack)
        return function(*config, *operands, **options)
    if operation == "linear_add":
        return function(x, weights[layer], residual, stack=stack)
    return function(x, scales[layer], weights[layer], norm_stack=norm_stack, stack=stack, **options)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_references_are_norm_product_and_what_follows(operation, activation):
    arrays = draw(np.random.default_rng(0), 5, 24, 40, jnp.float32)
    found = call(reference, operation, *arrays, 1, 1.0, activation)
    assert error(found, exact(operation, *arrays, 1.0, activation)) < 2e-6


def test_constants_hold_up_to_their_rows_and_beyond_the_last_there_are_none():
    one, some, product = FusedConfig(tile_out=16), FusedConfig(), Fused("linear_add", 64, 96, "bfloat16")
    table = {product: ((1, one), (2, None), (32, some))}
    assert choose(table, product, 1) == one
    assert choose(table, product, 2) is None
    assert choose(table, product, 3) == choose(table, product, 16) == some
    assert choose(table, product, 17) is None, "the kernel takes 16 rows"
    assert choose(table, product, 33) is None
    assert choose(table, product._replace(operation="norm_linear"), 1) is None


def test_a_device_that_was_not_measured_has_an_empty_table_and_one_line_in_the_log(caplog):
    read_table.cache_clear()
    with caplog.at_level(logging.INFO):
        assert read_table("A Card of Tomorrow") == {}
        assert read_table("A Card of Tomorrow") == {}
    (line,) = [record.getMessage() for record in caplog.records if "fused" in record.getMessage()]
    assert line == "fused products: A Card of Tomorrow was not measured (no A_Card_of_Tomorrow.json); none is used"


def test_every_table_can_be_read():
    for path in choice.TABLES.glob("*.json"):
        content = json.loads(path.read_text())
        assert choice.table_path(content["device"], choice.TABLES) == path
        for product, rows in parse_table(content).items():
            assert product.operation in (*OPERATIONS, "linear_all_reduce")
            assert [up_to for up_to, _ in rows] == sorted({up_to for up_to, _ in rows}), product


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_the_table_does_not_have_is_done_one_after_the_other(operation, monkeypatch):
    calls = []
    config = FusedConfig(tile_in=32)
    fake = type("Kernels", (), {operation: staticmethod(lambda *a, **k: calls.append(a[0]))})
    monkeypatch.setattr(tuned, "read_table", lambda kind: {Fused(operation, 24, 40, "float32"): ((2, config),)})
    monkeypatch.setattr(tuned, "_kernels", lambda: fake)
    for rows in (1, 2, 3):
        arrays = draw(np.random.default_rng(1), rows, 24, 40, jnp.float32)
        found = call(tuned, operation, *arrays, 1)
        if rows == 3:
            assert error(found, exact(operation, *arrays)) < 2e-6
    assert calls == [config, config]


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("rows", "on_tensor_cores", "offset", "activation", "dtype"),
    [
        (1, False, 0.0, "silu", HALF),
        (1, False, 1.0, "gelu", jnp.float32),
        (1, True, 1.0, "gelu_tanh", HALF),
        (5, True, 0.0, "gelu", HALF),
        (16, True, 0.0, "gelu_tanh", jnp.float32),
    ],
)
def test_the_kernel_gives_what_the_reference_gives(rows, on_tensor_cores, offset, activation, dtype, name, operation):
    kernels = importlib.import_module("jaxllm.kernels.fused_linear.triton")
    inputs, outputs = SIZES[name]
    arrays = draw(np.random.default_rng(rows), rows, inputs, outputs, dtype)
    config = FusedConfig(tile_in=32, tile_out=16, num_stages=3, on_tensor_cores=on_tensor_cores)

    def run(layer, x, residual, scales, weights):
        with poisoned_results():
            return call(kernels, operation, x, residual, scales, weights, layer, offset, activation, (config,))

    out = jax.jit(run)(jnp.int32(1), *arrays)
    expected = exact(operation, *arrays, offset, activation)
    with jax.default_matmul_precision("highest"):
        plain = call(reference, operation, *arrays, 1, offset, activation)
    assert (out.dtype, out.shape) == (plain.dtype, plain.shape)
    assert error(out, expected) < max(1.5 * error(plain, expected), 2e-6)


LARGE = [("norm_linear", 2048, 4096), ("norm_gated_linear", 1024, 6144), ("linear_add", 3072, 1024)]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("operation", "inputs", "outputs"), LARGE)
def test_large_products_are_the_reference_s_and_repeat_bit_by_bit(operation, inputs, outputs, rows):
    kernels = importlib.import_module("jaxllm.kernels.fused_linear.triton")
    arrays = draw(np.random.default_rng(rows), rows, inputs, outputs, HALF)
    expected = exact(operation, *arrays)
    allowed = 1.5 * error(call(reference, operation, *arrays, 1), expected)
    for config in (FusedConfig(), FusedConfig(256, 16, 8, 3, on_tensor_cores=False)):
        outs = [np.asarray(call(kernels, operation, *arrays, 1, config=(config,)), np.float32) for _ in range(3)]
        assert error(outs[0], expected) < allowed
        assert all((out == outs[0]).all() for out in outs)


@pytest.mark.gpu
def test_what_the_table_of_this_gpu_chooses_gives_what_the_reference_gives():
    kernels = importlib.import_module("jaxllm.kernels.fused_linear.triton")
    for product, rows in read_table(device_kind()).items():
        over_ranks = product.operation == "linear_all_reduce"  # one GPU has no peers: its part, by the same constants
        operation = "linear_add" if over_ranks else product.operation
        for num_rows, config in rows:
            arrays = draw(np.random.default_rng(num_rows), num_rows, product.inputs, product.outputs, product.dtype)
            expected = np.asarray(call(reference, operation, *arrays, 1), np.float64)
            if over_ranks and config:
                found = call(kernels, operation, *arrays, 1, config=(config,))
            else:
                found = call(tuned, operation, *arrays, 1)
            assert error(found, expected) < 1e-2, (product, num_rows)
