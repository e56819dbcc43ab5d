"""A padded step takes what the cost model says of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.engine.buckets import StepShape
from jaxllm.mesh.cost_model import StepLoad, step_time
from jaxllm.scheduler.batch import RankBatch, Scheduled, ScheduledBatch
from jaxllm.simulate.device import ModelledDevice, load_of

NOBODY: Any = SimpleNamespace()


def part(*pairs: tuple[int, int]) -> RankBatch:
    return RankBatch(tuple(Scheduled(NOBODY, row, start, count, True) for row, (start, count) in enumerate(pairs)))


def test_padding_is_computed_and_contexts_are_those_of_requests():
    decode = load_of(StepShape(8, 8, 64, "greedy"), part((99, 1), (199, 1), (0, 1)))
    assert decode == StepLoad(8, 301)
    mixed = load_of(StepShape(256, 16, 64, "greedy"), part((99, 1), (0, 100), (50, 20)))
    assert mixed == StepLoad(1, 100, 255, 100 * 50 + 20 * 60, 15)
    assert (mixed.num_tokens, mixed.num_sampled) == (256, 16)


def test_a_step_takes_the_cost_models_time_on_its_slowest_rank_without_the_host(subject):
    s = subject("8xH200")
    device = ModelledDevice(s.shape, s.device, 4)
    padded, light, heavy = StepShape(512, 16, 64, "greedy"), part((9, 1), (0, 300)), part((9000, 1), (1000, 400))
    for _ in range(2):  # the second time from what was kept
        seconds = device.device_seconds(padded, ScheduledBatch((light, heavy), 1))
        spent = step_time(s.shape, s.device, load_of(padded, heavy), 4)
        assert seconds == pytest.approx(spent.total - spent.host)
        assert seconds > device.device_seconds(padded, ScheduledBatch((light, light), 1))
    assert device.host_seconds(100) == pytest.approx((s.device.host_us + 100 * s.device.host_request_us) * 1e-6)
