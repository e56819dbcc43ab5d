"""Constants come back from times that they made; the shapes of the test are none of the fit's."""

from dataclasses import replace

import numpy as np
import pytest

from jaxllm.calibrate.fit import errors_of, fit, host_of, median_error, predict, split
from jaxllm.calibrate.measure import Timed, grid
from jaxllm.engine.buckets import make_buckets
from jaxllm.mesh.cost_model import DeviceSpec, StepLoad
from jaxllm.planning.devices import find_devices
from jaxllm.planning.model_shape import read_model, shape_of

SHAPE = shape_of(read_model("llama-3.1-8b"), "8B")
BUCKETS = make_buckets(64, 2048, 512, coarse=False)


def timed_on(device: DeviceSpec, noise: float) -> list[Timed]:
    draw, steps = np.random.default_rng(0), []
    for case in grid(BUCKETS, 4096):
        B, total = case.num_requests, case.num_requests * case.num_tokens
        shape = BUCKETS.shape(total, B, 1, "greedy")
        load = StepLoad(B, B * (case.start + 1.0))
        if case.num_tokens > 1:
            pairs = total * (case.start + case.num_tokens / 2)
            load = StepLoad(0, 0.0, shape.num_tokens, pairs, shape.num_requests)
        step = Timed(case=case, shape=shape, load=load, seconds=1.0, build_seconds=(300 + 5 * B) * 1e-6)
        seconds = predict(SHAPE, device, step) * float(draw.normal(1.0, noise))
        steps.append(replace(step, seconds=seconds))
    return steps


def test_a_fit_finds_the_device_whose_times_it_gets_within_the_noise():
    _, true = find_devices("H200")
    beginning = replace(true, read_bandwidth=2e12, matmul_flops=4e14, attention_flops=1e14, product_us=20, blend=2.0)
    fitted, tested = split(timed_on(true, 0.03))
    assert median_error(errors_of(SHAPE, beginning, tested)) > 0.2
    found = fit(SHAPE, beginning, fitted)
    assert median_error(errors_of(SHAPE, found, tested)) < 0.04
    assert found.read_bandwidth == pytest.approx(true.read_bandwidth, rel=0.2)
    assert found.matmul_flops == pytest.approx(true.matmul_flops, rel=0.2)
    assert found.attention_flops == pytest.approx(true.attention_flops, rel=0.3)


def test_no_shape_is_both_fitted_to_and_tested_on():
    steps = timed_on(find_devices("H200")[1], 0.0)
    fitted, tested = split(steps)
    assert len(fitted) + len(tested) == len(steps)
    assert not {step.shape for step in fitted} & {step.shape for step in tested}
    for part in (fitted, tested):
        assert {step.shape.program for step in part} == {"decode", "mixed"}
        assert len(part) > len(steps) / 3
        assert len({step.shape.num_requests for step in part if step.shape.program == "mixed"}) > 1


def test_the_hosts_time_is_a_line_over_requests():
    assert host_of(timed_on(find_devices("H200")[1], 0.0)) == pytest.approx((300, 5))
