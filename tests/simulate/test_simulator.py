"""Clocks and figures, by hand: a step takes a second, or ten with a prompt; its launch takes a tenth."""

import gc

import pytest

from jaxllm.engine.buckets import make_buckets
from jaxllm.scheduler.config import SchedulerConfig
from jaxllm.simulate.arrivals import Arrival
from jaxllm.simulate.figures import draw_figures
from jaxllm.simulate.simulator import Setting, simulate


class Clock:
    def __init__(self, decode: float = 1.0, host: float = 0.1):
        self._decode, self._host = decode, host

    def device_seconds(self, padded, batch) -> float:
        return 10.0 if padded.program == "mixed" else self._decode

    def host_seconds(self, num_requests) -> float:
        return self._host


def setting(**options) -> Setting:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    return Setting(scheduler=config, buckets=make_buckets(2, 32, 4, coarse=True), num_blocks=20, **options)


def test_a_request_alone_waits_for_its_launch_and_its_steps():
    used = setting()
    f = draw_figures(simulate([Arrival(20, 3, time=5.0)], used, Clock()), used)
    assert f.ttft.mean == pytest.approx(10.1)
    assert f.itl.mean == f.tpot.mean == pytest.approx(1.0)
    assert f.seconds == f.latency.mean == pytest.approx(12.1)
    assert f.device_busy_share == pytest.approx(12 / 12.1)
    assert (f.num_steps, f.num_scheduled_tokens, f.num_padded_tokens) == (3, 22, 12)
    assert (f.num_output_tokens, f.mean_batch, f.peak_waiting) == (3, 1, 0)
    assert gc.isenabled()


def test_a_slow_host_shows_between_two_tokens():
    used = setting()
    f = draw_figures(simulate([Arrival(20, 9)], used, Clock(decode=1.0, host=3.0)), used)
    assert f.itl.p99 == pytest.approx(3.0)


def test_those_beyond_the_rows_wait_and_a_pause_is_idle():
    used = setting()
    arrivals = [Arrival(20, 3), Arrival(20, 3), Arrival(20, 3), Arrival(20, 3, time=500.0)]
    record = simulate(arrivals, used, Clock())
    f = draw_figures(record, used)
    assert f.peak_waiting == 1
    assert record.steps[-1].launched > 500
    assert f.device_busy_share < 0.2
    assert sorted(map(len, record.sampled))[-1] == 2
    assert sum(map(len, record.sampled)) == f.num_output_tokens == 12
    assert max(f.course.waiting) > 0
    assert sum(f.course.tokens_per_second) * f.seconds / len(f.course.times) == pytest.approx(12)


def test_each_data_rank_has_figures_of_its_own():
    used = setting(num_ranks=2)
    f = draw_figures(simulate([Arrival(20, 3)] * 3, used, Clock()), used)
    assert [rank.num_tokens for rank in f.ranks] == [44, 22]
    assert sum(rank.num_tokens for rank in f.ranks) == f.num_scheduled_tokens
    assert len(f.course.kv_usage) == 2
