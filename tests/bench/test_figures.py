import dataclasses

import pytest

from jaxllm.bench.figures import Latencies, Run, Spread, StepFigures, agreement, mean_steps, measured, merged
from jaxllm.bench.workloads import WorkloadRequest

STEPS = StepFigures(
    num_steps=10,
    mean_batch=4.0,
    kv_utilisation=0.5,
    kv_usage_peak=0.25,
    padding_share=0.1,
    num_recomputed_tokens=3,
    num_discarded_tokens=2,
    num_preemptions=1,
    schedule_ms=1.0,
    build_ms=2.0,
    execute_ms=3.0,
    update_ms=4.0,
    wait_ms=5.0,
)


def test_a_spread_is_in_milliseconds_and_is_missing_where_nothing_was_measured():
    spread = Spread.of([0.001 * i for i in range(101)])
    assert spread is not None
    assert dataclasses.astuple(spread) == pytest.approx((50.0, 50.0, 90.0, 99.0))
    assert Spread.of([]) is None


def test_latencies_are_those_of_each_request_from_its_own_arrival():
    latencies = Latencies.of([[0.010, 0.020, 0.050], [0.030, 0.040], [0.100], []])
    assert latencies.ttft is not None
    assert latencies.ttft.mean == pytest.approx(1e3 * (0.010 + 0.030 + 0.100) / 3)
    assert latencies.tpot is not None
    assert latencies.tpot.mean == pytest.approx((20 + 10) / 2)  # one token has no time per token after the first
    assert latencies.itl is not None
    assert latencies.itl.mean == pytest.approx((10 + 30 + 10) / 3)
    assert latencies.e2e is not None
    assert latencies.e2e.p50 == pytest.approx(50)


def test_what_cannot_be_timed_has_no_latencies():
    assert Latencies.of([]).rows() == []
    assert Latencies.of([[], []]).rows() == []


def test_speeds_count_the_tokens_that_came():
    requests = [WorkloadRequest([1, 2, 3], 2), WorkloadRequest([1], 1)]
    m = measured("jaxllm", "W", "digest", requests, Run(2.0, [[7, 8], [9]]), 0.0)
    assert (m.num_prompt_tokens, m.num_output_tokens) == (4, 3)
    assert (m.output_tokens_per_second, m.total_tokens_per_second) == (1.5, 3.5)


def test_iterations_are_merged_into_one_measurement():
    batch = [WorkloadRequest([1, 2], 2)]
    runs = [Run(1.0, [[3, 4]], [[0.5, 1.0]], STEPS), Run(3.0, [[3, 4]], [[1.0, 3.0]], STEPS)]
    m = merged("jaxllm", "batch", [batch, batch], runs, 0.5)
    assert m.iteration_seconds == (1.0, 3.0)
    assert (m.num_requests, m.seconds, m.num_output_tokens) == (2, 4.0, 4)
    assert m.steps is not None
    assert (m.steps.num_steps, m.steps.num_recomputed_tokens, m.steps.mean_batch) == (20, 6, 4.0)


def test_a_mean_of_steps_weighs_each_run_by_its_steps_and_keeps_the_peak():
    short = dataclasses.replace(STEPS, num_steps=30, mean_batch=8.0, kv_usage_peak=0.75)
    mean = mean_steps([STEPS, short])
    assert mean is not None
    assert (mean.num_steps, mean.mean_batch, mean.kv_usage_peak) == (40, 7.0, 0.75)
    assert mean.host_ms == 10.0
    assert mean_steps([]) is None


def test_agreement_counts_whole_requests_and_the_tokens_before_the_first_difference():
    assert agreement([[1, 2, 3, 4], [1, 2]], [[1, 2, 9, 4], [1, 2]]) == (1, 0.75)
    assert agreement([[1, 2]], [[1, 2, 3, 4]]) == (0, 0.5)
    assert agreement([[1, 2]], [[1, 2]]) == (1, 1.0)
