import importlib.util
import json
from pathlib import Path

import pytest

from jaxllm.kernels.fused_linear.choice import Fused, FusedConfig, parse_table

ADD = Fused("linear_add", 64, 96, "bfloat16")
SMALL, LARGE = FusedConfig(tile_out=16), FusedConfig(tile_out=64)


@pytest.fixture(scope="module")
def tune():
    path = Path(__file__).parents[2] / "scripts" / "tune_fused.py"
    spec = importlib.util.spec_from_file_location("tune_fused", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_products_of_a_layer_are_four(tune):
    assert [tuple(fused) for fused in tune.list_layer("llama-3.1-8b", 1)] == [
        ("norm_linear", 4096, 6144, "bfloat16"),
        ("linear_add", 4096, 4096, "bfloat16"),
        ("norm_gated_linear", 4096, 28672, "bfloat16"),
        ("linear_add", 14336, 4096, "bfloat16"),
    ]
    assert [tuple(fused)[:3] for fused in tune.list_layer("llama-3.1-8b", 2)] == [
        ("norm_linear", 4096, 3072),
        ("linear_all_reduce", 2048, 4096),
        ("norm_gated_linear", 4096, 14336),
        ("linear_all_reduce", 7168, 4096),
    ]


def test_candidates_are_distinct_and_take_their_rows(tune):
    for model in ("qwen3-0.6b", "llama-3.1-8b"):
        for fused in tune.list_layer(model, 1):
            for num_rows in (1, 8, 16):
                configs = list(tune.candidates(tune.Case(fused, num_rows)))
                assert len(configs) == len(set(configs)) > 5
                assert all(config.takes(num_rows) for config in configs)
                assert all(config.on_tensor_cores for config in configs) == (num_rows > 1)


def test_a_table_holds_the_fastest_right_constants_and_none_where_xla_is_as_fast(tune, tmp_path, capsys):
    def rows(num_rows, xla, *others):
        case = tune.Case(ADD, num_rows)
        return [tune.Row(case, None, xla, 0.0), *(tune.Row(case, *other) for other in others)]

    measured = rows(1, 10.0, (SMALL, 6.0, 1e-3), (LARGE, 5.0, 0.5)) + rows(8, 10.0, (SMALL, 9.9, 1e-3))
    entries = tune.summarize(measured, [ADD], [1, 8, 16], {"a model": [ADD]})
    printed = capsys.readouterr().out
    assert "a model, 1 rows: the products of a layer 6.0 us, XLA 10.0 us" in printed
    assert "error 0.5" in printed
    path = tmp_path / "A_Card.json"
    tune.write_table(path, {"device": "A Card"}, entries)
    again = tune.summarize(rows(8, 10.0, (LARGE, 4.0, 1e-3)), [ADD], [8], {})
    tune.write_table(path, {"device": "A Card"}, again)
    assert parse_table(json.loads(path.read_text())) == {ADD: ((1, SMALL), (8, LARGE))}


def test_a_sum_over_ranks_may_take_as_much_longer_as_a_kernel_of_its_own_and_has_to_fit_a_chunk(tune):
    over_ranks, plain = Fused("linear_all_reduce", 64, 96, "bfloat16"), FusedConfig(tile_out=32)
    for micros, config, chosen in ((12.0, plain, plain), (14.5, plain, None), (9.0, FusedConfig(tile_out=64), None)):
        case = tune.Case(over_ranks, 8)
        rows = [tune.Row(case, None, 10.0, 0.0), tune.Row(case, config, micros, 1e-3)]
        (entry,) = tune.summarize(rows, [over_ranks], [8], {})
        assert parse_table({"products": [entry]})[over_ranks] == ((8, chosen),)
