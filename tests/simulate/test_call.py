"""What the scheduler makes of the comparison's workloads, on a device that is a formula."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config.errors import InputError
from jaxllm.mesh.planner import MeshShape
from jaxllm.simulate.arrivals import Arrival, lengths_of, synthetic
from jaxllm.simulate.call import Options, mesh_of, setting_of, simulate, simulate_on


def run(subject, workload="W2", devices="1xH200", count: int | None = 500, rate=None, tensor=1, **options):
    requests = synthetic(lengths_of(workload, 0, 0, count), "at-once" if rate is None else "poisson", rate)
    subject = subject(devices)
    return simulate_on(subject, mesh_of(subject, None, tensor), requests, Options(max_model_len=4096, **options))


def test_at_most_12_percent_of_a_workloads_tokens_are_padding_and_filling_sizes_saves_time(subject):
    filled, taken = run(subject), run(subject, fill_steps=False)
    assert filled.padding_share < 0.12
    assert filled.padding_share < 0.5 * taken.padding_share
    assert filled.seconds < taken.seconds


def test_a_target_holds_the_90th_percentile_and_makes_prompts_wait(subject):
    free, paced = run(subject), run(subject, target_tpot_ms=15)
    assert free.itl.p90 > 0.015 >= paced.itl.p90
    assert paced.ttft.mean > free.ttft.mean


def test_at_four_fifths_of_what_four_ranks_can_serve_the_busiest_has_few_tokens_more_than_the_mean(subject):
    limits: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
    most = run(subject, devices="4xH200", count=1000, **limits)
    f = run(subject, devices="4xH200", count=1000, rate=0.8 * most.requests_per_second, **limits)
    usage = list(zip(*f.course.kv_usage, strict=True))
    middle = usage[len(usage) // 4 : 3 * len(usage) // 4]  # neither filling nor emptying
    assert 1.0 <= statistics.fmean(max(step) / statistics.fmean(step) for step in middle) <= 1.1


def test_the_pool_is_that_of_a_plan_and_a_small_one_preempts(subject):
    setting = setting_of(subject("2xH200"), MeshShape(1, 2), Options())
    assert setting.num_blocks % 64 == 0
    assert setting.scheduler.max_model_len == 131_072
    small = setting_of(subject("2xH200"), MeshShape(1, 2), Options(num_gpu_blocks_override=100))
    assert small.scheduler.max_model_len == 99 * 16
    f = run(subject, count=100, num_gpu_blocks_override=600)
    assert f.num_preemptions > 0
    assert f.ranks[0].kv_usage_peak > 0.95
    assert f.num_recomputed_tokens == f.ranks[0].num_recomputed_tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens must be at least 16"),
        ({"scheduling_policy": "luck"}, "scheduling_policy: unknown scheduling policy 'luck'"),
        (
            {"tensor_parallel_size": 3},
            "data_parallel_size 1 x tensor_parallel_size 3 are 3 devices, but devices names 2",
        ),
        ({"max_model_len": 64}, "request 0 of the traffic: the prompt has 100 tokens, but max_model_len 64"),
        ({"max_model_len": 4096, "num_gpu_blocks_override": 50}, "50 blocks is smaller than max_model_len 4,096"),
        ({"gpu_memory_utilization": 0.1}, "leave no KV on H200"),
    ],
)
def test_a_mistake_is_told_with_its_numbers(options, said):
    with pytest.raises(InputError, match=said):
        simulate("llama-3.1-8b", "2xH200", [Arrival(100, 20)], **options)


BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
RUN = json.loads((BENCHMARKS / "engine-h200.json").read_text())
TWO = json.loads((BENCHMARKS / "engine-8b-2xh200.json").read_text())
AS_MEASURED: dict[str, Any] = {"num_gpu_blocks_override": 36_000, "enable_prefix_caching": False}


def assert_medians(f, result):
    for name, spread in {"ttft": f.ttft, "tpot": f.tpot, "e2e": f.latency}.items():
        assert 1e3 * spread.p50 == pytest.approx(result["latencies_ms"][name]["p50"], rel=0.15)


@pytest.mark.parametrize("workload", ["W1", "W2", "W3"])
def test_a_workload_has_the_steps_of_the_h200s_run_and_its_medians_within_15_percent(subject, workload):
    wanted = {"model": "llama-3.1-8b", "workload": workload, "max_num_seqs": 256, "engine": "jaxllm"}
    (row,) = [row for row in RUN["rows"] if wanted.items() <= row.items()]
    steps = row["result"]["steps"]
    f = run(subject, workload, count=None, **AS_MEASURED)
    assert (f.num_steps, f.mean_batch, f.padding_share) == pytest.approx(
        (steps["num_steps"], steps["mean_batch"], steps["padding_share"])
    )
    looked_at = [step.kv_usage[0] for step in f.steps[::16]]  # as the engine does
    assert max(looked_at) == pytest.approx(steps["kv_usage_peak"])
    assert_medians(f, row["result"])


@pytest.mark.parametrize("workload", ["W1", "W2", "W3"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_two_h200s_have_the_medians_of_their_run_within_15_percent(subject, tensor, workload):
    runs = [run for run in TWO["runs"] if ("--tensor-parallel-size 2" in run["command"]) == (tensor == 2)]
    (row,) = [row for run in runs for row in run["rows"] if row["workload"] == workload]
    assert_medians(run(subject, workload, "2xH200", None, tensor=tensor, **AS_MEASURED), row["result"])
