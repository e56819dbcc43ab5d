import importlib.util
import json
from pathlib import Path

import pytest

from jaxllm.kernels.matmul.choice import XLA, Choice, FewRowsConfig, MosaicConfig, Product, parse_table

PRODUCT = Product(64, 96, False, "bfloat16")
FEW, MANY = Choice("triton", FewRowsConfig(split=4)), Choice("mosaic", MosaicConfig(tile_rows=64))


@pytest.fixture(scope="module")
def tune():
    path = Path(__file__).parents[2] / "scripts" / "tune_kernels.py"
    spec = importlib.util.spec_from_file_location("tune_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_products_of_a_model_are_those_of_one_tensor_rank(tune):
    cfg = tune.read_shapes("llama-3.1-8b")
    sizes = [(p.inputs, p.outputs, p.transposed) for p in tune.list_products(cfg, 1)]
    assert sizes == [
        (4096, 6144, False),
        (4096, 4096, False),
        (4096, 28672, False),
        (14336, 4096, False),
        (4096, 128256, True),
    ]
    halves = [(p.inputs, p.outputs) for p in tune.list_products(cfg, 2)]
    assert halves == [(4096, 3072), (2048, 4096), (4096, 14336), (7168, 4096), (4096, 64128)]


def test_every_candidate_can_take_its_rows_and_xla_is_the_first(tune):
    for num_rows in (1, 16, 64, 128, 512):
        for product in tune.list_products(tune.read_shapes("llama-3.1-8b"), 1):
            first, *others, last = tune.candidates(product, num_rows)
            assert first.choice == last.choice == XLA
            assert first.is_tuned
            assert not last.is_tuned
            assert others
            assert all(row.choice.config.takes(product, num_rows) for row in others)
            assert len({row.choice for row in others}) == len(others)
            for config in (row.choice.config for row in others if row.choice.kernel == "turned"):
                stage = (2 * config.tile_out + config.tile_rows) * config.tile_in * 2
                assert config.num_stages * stage <= tune.ROOM


def test_a_table_has_the_fastest_right_kernel_and_xla_where_none_wins_clearly(tune, tmp_path):
    def row(num_rows, choice, micros, error=0.0):
        return tune.Row(PRODUCT, num_rows, choice, micros, error)

    ceilings = tune.Ceilings(4e12, 8e14)
    measured = [
        tune.Row(PRODUCT, 16, XLA, 1.0, 0.0, is_tuned=False),  # which no step can choose for one product alone
        *(row(1, XLA, 10.0), row(1, FEW, 5.0), row(1, MANY, 2.0, error=0.3)),
        *(row(16, XLA, 10.0), row(16, FEW, 9.8)),
        *(row(64, XLA, 20.0), row(64, MANY, 9.0), tune.Row(PRODUCT, 64, FEW, note="too large")),
        row(256, FEW, 1.0),  # without XLA's time there is nothing to compare with
    ]
    path = tmp_path / "A_Card.json"
    tune.write_table(path, {"device": "A Card"}, tune.summarize(measured, [PRODUCT], [64, 16, 1, 256], ceilings))
    assert parse_table(json.loads(path.read_text())) == {PRODUCT: ((1, FEW), (16, XLA), (64, MANY))}
    again = tune.summarize([row(16, XLA, 10.0), row(16, FEW, 5.0)], [PRODUCT], [16], ceilings)
    tune.write_table(path, {"device": "A Card"}, again)
    assert parse_table(json.loads(path.read_text())) == {PRODUCT: ((1, FEW), (16, FEW), (64, MANY))}


def test_no_product_can_be_faster_than_reading_its_matrix_or_than_its_operations(tune):
    ceilings = tune.Ceilings(copy=4e12, matmul=8e14)
    product = Product(4096, 28672, False, "bfloat16")
    assert ceilings.floor(product, 1) == pytest.approx(4096 * 28672 * 2 / 4e12 * 1e6, rel=1e-3)
    assert ceilings.floor(product, 512) == pytest.approx(2 * 512 * 4096 * 28672 / 8e14 * 1e6, rel=1e-6)
