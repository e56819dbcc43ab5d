"""The books of requests: tokens that are told late count when they came."""

from jaxllm.api import metrics
from jaxllm.api.metrics import Histogram, RequestBooks
from jaxllm.api.outputs import OutputDelta
from jaxllm.engine.messages import EngineStats


def test_tokens_that_are_told_at_the_end_are_booked_with_the_steps_that_brought_them(monkeypatch):
    now = 100.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    books = RequestBooks(100)
    meter = books.start(4)
    for step, num_quiet in enumerate((0, 0, 1, 2, 3)):  # the second one brings a token that is told
        now = 100.0 + 0.03 * step
        books.take_step(num_quiet)
        if step == 1:
            meter.take(OutputDelta(token_ids=(5,), num_output_tokens=1))
    meter.take(OutputDelta(token_ids=(6, 7, 8), num_output_tokens=4, finish_reason="length"), None, 3)
    told = {metric.name: metric for metric in books.read("m", EngineStats()) if not metric.labels.get("source")}
    between = told["vllm:inter_token_latency_seconds"]
    mean = told["vllm:request_time_per_output_token_seconds"]
    assert isinstance(between, Histogram)
    assert isinstance(mean, Histogram)
    assert (between.count, round(between.sum, 6)) == (3, 0.09)
    assert (mean.count, round(mean.sum, 6)) == (1, 0.03)
    assert getattr(told["vllm:generation_tokens"], "value", None) == 4
