"""Prometheus metrics with vLLM's names, counted from what requests were given. Knows times and numbers; no HTTP."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxllm.api.outputs import OutputDelta
from jaxllm.engine.messages import EngineStats

FINISH_REASONS = ("stop", "length", "abort", "error")
_LABELS = ("model_name", "engine")
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_WHOLE_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class ServerMetrics:
    """The metrics of one server, in a registry of their own; `read_stats` gives the engine's gauges when asked."""

    def __init__(self, model_name: str, max_model_len: int, read_stats: Callable[[], EngineStats]):
        self.registry = CollectorRegistry()
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._model_name = model_name
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        sources = Counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by origin.", (*_LABELS, "source"), registry=self.registry
        )
        self._computed = sources.labels(model_name, "0", "local_compute")
        self._hit = sources.labels(model_name, "0", "local_cache_hit")
        self._generation_tokens = self._counter("generation_tokens", "Tokens given to requests.")
        success = Counter(
            "vllm:request_success", "Requests by how they ended.", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self._ended = {reason: success.labels(model_name, "0", reason) for reason in FINISH_REASONS}
        lengths = tuple(sizes_up_to(max_model_len))
        seconds = "in seconds."
        self._first = self._histogram("time_to_first_token_seconds", f"Arrival to first token {seconds}", _FIRST_TOKEN)
        self._between = self._histogram("inter_token_latency_seconds", f"Token to token {seconds}", _BETWEEN_TOKENS)
        self._mean = self._histogram(
            "request_time_per_output_token_seconds", f"A request's mean from token to token {seconds}", _BETWEEN_TOKENS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", f"Arrival to end {seconds}", _WHOLE_REQUEST)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self._output_length = self._histogram("request_generation_tokens", "Output tokens of a request.", lengths)
        self.registry.register(_EngineCollector(model_name, read_stats))

    def start(self, num_prompt_tokens: int) -> "RequestMeter":
        """Begins to follow a request that has just arrived."""
        return RequestMeter(self, num_prompt_tokens)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"vllm:{name}", help, _LABELS, registry=self.registry).labels(self._model_name, "0")

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"vllm:{name}", help, _LABELS, buckets=buckets, registry=self.registry)
        return family.labels(self._model_name, "0")


class RequestMeter:
    """Books one request from arrival to end. Prompt tokens count with the first token, others as they are given."""

    def __init__(self, metrics: ServerMetrics, num_prompt_tokens: int):
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._arrival = time.perf_counter()
        self._first: float | None = None
        self._last = self._arrival
        self._ended = False

    def take(self, delta: OutputDelta) -> None:
        """Books what came new."""
        metrics, count = self._metrics, len(delta.token_ids)
        if count:
            now = time.perf_counter()
            if self._first is None:
                self._first = now
                metrics._first.observe(now - self._arrival)
                metrics._prompt_tokens.inc(self._num_prompt_tokens)
                metrics._cached_tokens.inc(delta.num_cached_tokens)
                metrics._hit.inc(delta.num_cached_tokens)
                metrics._computed.inc(self._num_prompt_tokens - delta.num_cached_tokens)
                metrics.num_prompt_tokens += self._num_prompt_tokens
            else:
                metrics._between.observe(now - self._last)
            self._last = now
            self._num_output_tokens += count
            metrics._generation_tokens.inc(count)
            metrics.num_generation_tokens += count
        if delta.finish_reason is not None:
            self.end(delta.finish_reason)

    def end(self, reason: str) -> None:
        """Books the end; the first reason counts."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics._ended[reason].inc()
        metrics._whole.observe(time.perf_counter() - self._arrival)
        metrics._prompt_length.observe(self._num_prompt_tokens)
        metrics._output_length.observe(self._num_output_tokens)
        if self._first is not None and self._num_output_tokens > 1:
            metrics._mean.observe((self._last - self._first) / (self._num_output_tokens - 1))


class _EngineCollector(Collector):
    """Reads the engine's gauges and counters when Prometheus asks."""

    def __init__(self, model_name: str, read_stats: Callable[[], EngineStats]):
        self._labels = (model_name, "0")
        self._read_stats = read_stats

    def collect(self) -> Iterable[Metric]:
        stats = self._read_stats()
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for kind, name, help, value in (
            (gauge, "num_requests_running", "Requests in the batch.", stats.running),
            (gauge, "num_requests_waiting", "Requests in the queue.", stats.waiting),
            (gauge, "kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", stats.kv_usage),
            (counter, "num_preemptions", "Requests sent back to the queue.", stats.num_preemptions),
            (
                counter,
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            (counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
        ):
            family = kind(f"vllm:{name}", help, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family


def sizes_up_to(limit: int) -> Iterable[float]:
    """Buckets 1, 2, 5, 10, 20, 50, ... as vLLM has them."""
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > limit:
                return
            yield step * power
        power *= 10
