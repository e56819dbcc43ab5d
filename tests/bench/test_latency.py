from collections.abc import Callable

import pytest


def test_every_iteration_is_a_batch_of_its_own(bench: Callable):
    sizes = ("--batch-size", "2", "--input-len", "20", "--output-len", "6")
    report, printed = bench("latency", *sizes, "--num-iters", "3", "--num-iters-warmup", "1", "--save-detailed")
    (result,) = report["results"]
    assert result["num_requests"] == 6
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert sorted(result["latencies"])[1] == pytest.approx(result["percentiles"]["50"])
    assert len({tuple(tokens) for tokens in result["outputs"]}) > 2  # not one batch three times
    assert "| batch" in printed


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-iters", "0"], "--num-iters must be at least 1, got 0"),
        (["--num-iters-warmup", "-1"], "--num-iters-warmup must be at least 0, got -1"),
        (["--workload", "L8", "--batch-size", "4"], "--batch-size=4 has no effect on a workload"),
    ],
)
def test_a_mistake_is_told_before_anything_is_started(flags: list[str], says: str, refused: Callable):
    assert says in refused("latency", *flags)
