"""The reference product, the table of choices, and the Triton kernel: in Triton's interpreter, and on a GPU."""

import importlib
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.kernels.launch import capability, device_kind, poisoned_results
from jaxllm.kernels.matmul import choice, reference, tuned
from jaxllm.kernels.matmul.choice import (
    XLA,
    Choice,
    FewRowsConfig,
    MosaicConfig,
    Product,
    Stack,
    TurnedConfig,
    choose,
    parse_table,
    read_table,
)

L = 3
# Triton's interpreter takes bfloat16 for integers.
HALF = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float16
PRODUCT = Product(64, 96, False, "bfloat16")


def draw(rng, rows, inputs, outputs, transposed, dtype):
    """Rows and matrices of all layers; whoever reads a layer beside the middle one finds NaN."""
    x = jnp.asarray(rng.normal(size=(rows, inputs)), dtype)
    weight = np.full((L, *((outputs, inputs) if transposed else (inputs, outputs))), np.nan)
    weight[1] = rng.normal(size=weight.shape[1:])
    return x, jnp.asarray(weight, dtype)


def exact(x, weight, transposed):
    w = np.asarray(weight[1], np.float64)
    return np.asarray(x, np.float64) @ (w.T if transposed else w)


def error(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_reference_is_the_product_with_the_matrix(transposed):
    x, weight = draw(np.random.default_rng(0), 5, 24, 40, transposed, jnp.float32)
    out = reference.matmul(x, weight[1], transposed=transposed)
    assert error(out, exact(x, weight, transposed)) < 1e-6


def test_a_choice_holds_up_to_its_rows_and_beyond_the_last_it_is_xla():
    few, some = Choice("triton", FewRowsConfig(split=2)), Choice("triton", FewRowsConfig(tile_out=128))
    table = {PRODUCT: ((1, few), (16, some))}
    assert choose(table, PRODUCT, 1) == few
    assert choose(table, PRODUCT, 2) == choose(table, PRODUCT, 16) == some
    assert choose(table, PRODUCT, 17) == XLA
    assert choose(table, PRODUCT._replace(transposed=True), 1) == XLA
    assert choose(table, PRODUCT._replace(dtype="float32"), 1) == XLA


def test_a_choice_that_cannot_take_so_many_rows_is_xla():
    mosaic = Choice("mosaic", MosaicConfig(tile_rows=64, tile_out=48, tile_in=64))
    table = {PRODUCT: ((256, mosaic),), PRODUCT._replace(outputs=100): ((256, mosaic),)}
    assert choose(table, PRODUCT, 128) == mosaic
    assert choose(table, PRODUCT, 96) == XLA
    assert choose(table, PRODUCT._replace(outputs=100), 128) == XLA


def test_a_kernel_that_cannot_be_imported_leaves_products_to_xla_with_one_line(monkeypatch, caplog):
    def fail(name):
        raise ImportError("no such kernel")

    tuned.is_usable.cache_clear()
    monkeypatch.setattr(tuned.importlib, "import_module", fail)
    table = {Product(24, 40, False, "float32"): ((8, Choice("triton", FewRowsConfig())),)}
    monkeypatch.setattr(tuned, "read_table", lambda kind: table)
    x, weight = draw(np.random.default_rng(2), 3, 24, 40, False, jnp.float32)
    for _ in range(2):
        assert error(tuned.matmul(x, weight[1], stack=Stack(weight, 1)), exact(x, weight, False)) < 1e-6
    assert [r.getMessage() for r in caplog.records] == [
        "matmul: triton cannot be used, XLA multiplies instead: ImportError('no such kernel')"
    ]
    tuned.is_usable.cache_clear()


def test_a_device_that_was_not_measured_has_an_empty_table_and_one_line_in_the_log(caplog):
    read_table.cache_clear()
    with caplog.at_level(logging.INFO):
        assert read_table("A Card of Tomorrow") == {}
        assert read_table("A Card of Tomorrow") == {}
    (line,) = [record.getMessage() for record in caplog.records if "matmul" in record.getMessage()]
    assert line == (
        "matmul: A Card of Tomorrow was not measured (no A_Card_of_Tomorrow.json); XLA multiplies everything"
    )


def test_every_table_can_be_read():
    for path in choice.TABLES.glob("*.json"):
        content = json.loads(path.read_text())
        assert choice.table_path(content["device"]) == path
        for product, rows in parse_table(content).items():
            assert rows, product
            assert [up_to for up_to, _ in rows] == sorted({up_to for up_to, _ in rows}), product


def test_the_tuned_version_multiplies_by_the_kernel_that_the_table_names(monkeypatch):
    calls = []
    tuned.is_usable.cache_clear()
    few = FewRowsConfig(tile_in=32)
    table = {Product(24, 40, False, "float32"): ((2, Choice("triton", few)), (4, XLA), (8, Choice("triton", few)))}
    fake = type("Kernel", (), {"multiply": staticmethod(lambda *a, **k: calls.append(a[0]))})
    monkeypatch.setattr(tuned, "read_table", lambda kind: table)
    monkeypatch.setattr(tuned.importlib, "import_module", lambda name: fake)
    rng = np.random.default_rng(1)
    for rows in (1, 3, 6, 9):
        x, weight = draw(rng, rows, 24, 40, False, jnp.float32)
        out = tuned.matmul(x, weight[1], stack=Stack(weight, 1))
        if rows in (3, 9):
            assert error(out, exact(x, weight, False)) < 1e-6
    assert calls == [few, few]


SIZES = {
    "even": (128, 192),
    "odd_outputs": (128, 200),
    "odd_inputs": (168, 64),
    "one_tile": (32, 16),
}


def few_rows():
    return importlib.import_module("jaxllm.kernels.matmul.triton_few_rows")


@pytest.mark.interpreter
@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("rows", "split", "on_tensor_cores", "dtype"),
    [
        (1, 1, True, HALF),
        (1, 3, False, HALF),
        (1, 2, False, jnp.float32),
        (5, 2, True, HALF),
        (16, 1, True, jnp.float32),
        (23, 4, True, jnp.float32),
    ],
)
def test_few_rows_are_multiplied_like_by_the_reference(rows, split, on_tensor_cores, dtype, name, transposed):
    inputs, outputs = SIZES[name]
    x, weight = draw(np.random.default_rng(rows), rows, inputs, outputs, transposed, dtype)
    config = FewRowsConfig(tile_in=32, tile_out=64, split=split, num_stages=3, on_tensor_cores=on_tensor_cores)

    def run(x, weight, layer):
        with poisoned_results():
            return few_rows().multiply(config, x, Stack(weight, layer), transposed=transposed)

    out = jax.jit(run)(x, weight, jnp.int32(1))
    assert out.dtype == x.dtype
    assert out.shape == (rows, outputs)
    expected = exact(x, weight, transposed)
    with jax.default_matmul_precision("highest"):
        own = error(reference.matmul(x, weight[1], transposed=transposed), expected)
    assert error(out, expected) < max(1.5 * own, 1e-6)


def test_the_turned_kernel_takes_whole_groups_of_rows_outputs_turns_and_parts():
    config = TurnedConfig(tile_in=64, split=2)
    assert config.takes(Product(256, 192, False, "bfloat16"), 24)
    assert config.takes(Product(256, 192, True, "float16"), 8)
    assert not config.takes(Product(256, 192, False, "bfloat16"), 20)
    assert not config.takes(Product(192, 192, False, "bfloat16"), 24)
    assert not config.takes(Product(256, 96, False, "bfloat16"), 24)
    assert not config.takes(Product(256, 192, False, "float32"), 24)


TURNED = {
    "one_turn_each": (8, 128, 256, TurnedConfig(64, 8, 64, 2, split=2)),
    "several_items_a_block": (24, 256, 640, TurnedConfig(64, 24, 64, 3)),
    "rows_and_outputs_end_within_a_tile": (40, 256, 448, TurnedConfig(64, 16, 64, 2)),
    "clusters": (64, 256, 512, TurnedConfig(64, 32, 64, 2, cluster=2)),
    "clusters_behind_the_end_and_parts": (32, 512, 384, TurnedConfig(64, 32, 128, 2, split=2, cluster=2)),
    "large_tiles": (48, 256, 512, TurnedConfig(128, 48, 128, 2)),
}


@pytest.mark.gpu
@pytest.mark.interpreter
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", TURNED)
def test_the_turned_product_is_the_reference_s(name, transposed, monkeypatch):
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and capability() != 90:
        pytest.skip("the turned product is for Hopper")
    turned = importlib.import_module("jaxllm.kernels.matmul.mosaic_turned")
    rows, inputs, outputs, config = TURNED[name]
    interpret = None
    if not on_gpu:
        monkeypatch.setattr(turned, "num_multiprocessors", lambda: 4)  # so that each takes several items
        interpret = importlib.import_module("jax.experimental.pallas.mosaic_gpu").InterpretGPUParams()
    dtype = jnp.bfloat16 if on_gpu else jnp.float16
    x, weight = draw(np.random.default_rng(rows), rows, inputs, outputs, transposed, dtype)
    expected = exact(x, weight, transposed)
    own = error(reference.matmul(x, weight[1], transposed=transposed), expected)
    for _ in range(3 if on_gpu else 1):  # a race shows in one run and not in the next
        stack = Stack(weight, jnp.int32(1))
        out = turned.multiply(config, x, stack, transposed=transposed, interpret=interpret)
        assert out.shape == (rows, outputs)
        assert out.dtype == dtype
        assert error(out, expected) < 1.5 * own


LARGE = [
    (8, 4096, 4096, TurnedConfig(64, 8, 128, 5, split=4)),
    (64, 4096, 6144, TurnedConfig(64, 64, 64, 8, cluster=2)),
    (128, 4096, 4096, TurnedConfig(128, 128, 64, 4, split=4, cluster=4)),
    (256, 4096, 9216, TurnedConfig(64, 256, 64, 4, cluster=2)),
    (384, 4096, 4096, TurnedConfig(128, 192, 64, 3, cluster=2)),
    (512, 2048, 8256, TurnedConfig(64, 256, 64, 4, cluster=4)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inputs", "outputs", "config"), LARGE)
@pytest.mark.parametrize("transposed", [False, True])
def test_large_turned_products_are_the_reference_s(rows, inputs, outputs, config, transposed):
    if capability() != 90:
        pytest.skip("the turned product is for Hopper")
    turned = importlib.import_module("jaxllm.kernels.matmul.mosaic_turned")
    x, weight = draw(np.random.default_rng(rows), rows, inputs, outputs, transposed, jnp.bfloat16)
    expected = exact(x, weight, transposed)
    own = error(reference.matmul(x, weight[1], transposed=transposed), expected)
    for _ in range(3):
        assert error(turned.multiply(config, x, Stack(weight, 1), transposed=transposed), expected) < 1.5 * own


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "side_by_side", "layer"), [(64, True, 1), (256, False, jnp.int32(1))])
def test_many_rows_are_multiplied_like_by_the_reference(rows, side_by_side, layer):
    mosaic = importlib.import_module("jaxllm.kernels.matmul.mosaic")
    if capability() != 90:
        pytest.skip("Mosaic's product is for Hopper")
    x, weight = draw(np.random.default_rng(rows), rows, 512, 1024, False, jnp.bfloat16)
    config = MosaicConfig(tile_rows=64, tile_out=64, side_by_side=side_by_side)
    out = jax.jit(lambda x, weight, layer: mosaic.multiply(config, x, Stack(weight, layer)))(x, weight, layer)
    expected = exact(x, weight, False)
    assert error(out, expected) < 1.5 * error(reference.matmul(x, weight[1]), expected)


@pytest.mark.gpu
def test_what_the_table_of_this_gpu_chooses_gives_what_the_reference_gives():
    for product, rows in read_table(device_kind()).items():
        for num_rows, best in rows:
            keys = jax.random.split(jax.random.key(num_rows))
            shape = (product.outputs, product.inputs) if product.transposed else (product.inputs, product.outputs)
            x = jax.random.normal(keys[0], (num_rows, product.inputs), product.dtype)
            weight = jax.random.normal(keys[1], shape, product.dtype)
            expected = reference.matmul(x, weight, transposed=product.transposed).astype(jnp.float32)
            out = tuned.multiply(best, x, weight, transposed=product.transposed).astype(jnp.float32)
            off = jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)
            assert float(off) < 5e-3, (product, num_rows, best)
