"""Metrics with vLLM's names, counted from what requests were given, and readings of them. Knows times and numbers."""

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxllm.api.outputs import OutputDelta
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.engine.messages import STEP_SIZES, EngineStats

FINISH_REASONS = ("stop", "length", "abort", "error")
PREFIX = "vllm:"

# What each means, in the order in which they are told. Names without a prefix are vLLM's.
DESCRIPTIONS: dict[str, str] = {
    "num_requests_running": "Requests in the batch.",
    "num_requests_waiting": "Requests in the queue.",
    "num_requests_waiting_by_reason": "Requests in the queue by what they wait for.",
    "kv_cache_usage_perc": "Share of the KV pool in use, 0 to 1.",
    "cache_config_info": "The KV pool of a data rank, in labels.",
    "num_preemptions": "Requests sent back to the queue.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens": "Prompt tokens of requests that got their first token.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "prompt_tokens_by_source": "Prompt tokens by origin.",
    "generation_tokens": "Tokens given to requests.",
    "jaxllm:step_tokens": "Tokens of requests that steps computed.",
    "jaxllm:padding_tokens": "Tokens that steps computed in vain.",
    "iteration_tokens_total": "Tokens of requests in a step.",
    "request_success": "Samples of requests by how they ended.",
    "time_to_first_token_seconds": "Arrival to first token in seconds.",
    "inter_token_latency_seconds": "Token to token in seconds.",
    "request_time_per_output_token_seconds": "A sample's mean from token to token in seconds.",
    "e2e_request_latency_seconds": "Arrival to end in seconds.",
    "request_queue_time_seconds": "Arrival to first step in seconds.",
    "request_prefill_time_seconds": "First step to first token in seconds.",
    "request_decode_time_seconds": "First token to last token in seconds.",
    "request_inference_time_seconds": "First step to last token in seconds.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Output tokens of a sample.",
    "request_max_num_generation_tokens": "Output tokens of a request's longest sample.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a request that were computed, not found in a cache.",
    "request_params_n": "Samples that a request asks for.",
    "request_params_max_tokens": "Output tokens that a request asks for.",
}

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
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A reading of one metric; its name has a prefix, and not the `_total` of Prometheus' text."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """What only grows."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """What goes up and down."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """A list of numbers that only grow."""

    values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """Observations; `buckets` counts those up to each bound, the last of which is "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


class _Tally:
    """A histogram in the making."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def read(self, name: str, labels: dict[str, str]) -> Histogram:
        return _histogram(name, labels, self._bounds, self._counts, self._sum)


def _histogram(
    name: str, labels: dict[str, str], bounds: Sequence[float], counts: Sequence[int], total: float
) -> Histogram:
    """Adds up observations counted between the bounds, as Prometheus wants them."""
    buckets, below = {}, 0
    for bound, count in zip((*map(str, map(float, bounds)), "+Inf"), counts, strict=True):
        below += count
        buckets[bound] = below
    return Histogram(name=name, labels=labels, count=below, sum=total, buckets=buckets)


class RequestBooks:
    """What the requests of one engine were given, whichever thread they come from."""

    def __init__(self, max_model_len: int):
        self.lock = threading.Lock()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.ended: dict[str, int] = dict.fromkeys(FINISH_REASONS, 0)
        lengths = tuple(sizes_up_to(max_model_len))
        self.first = _Tally(_FIRST_TOKEN)
        self.between = _Tally(_BETWEEN_TOKENS)
        self.mean = _Tally(_BETWEEN_TOKENS)
        self.whole = _Tally(_WHOLE_REQUEST)
        self.queue = _Tally(_WHOLE_REQUEST)
        self.prefill = _Tally(_WHOLE_REQUEST)
        self.decode = _Tally(_WHOLE_REQUEST)
        self.inference = _Tally(_WHOLE_REQUEST)
        self.prompt_length = _Tally(lengths)
        self.prompt_computed = _Tally(lengths)
        self.output_length = _Tally(lengths)
        self.longest_output = _Tally(lengths)
        self.num_samples = _Tally(_SAMPLES)
        self.max_tokens = _Tally(lengths)
        self._num_quiet = 0
        self.step_before = self._last_step = 0.0

    def start(self, num_prompt_tokens: int, params: SamplingParams | None = None) -> "RequestMeter":
        """Begins to follow a request that has just arrived."""
        return RequestMeter(self, num_prompt_tokens, params or SamplingParams())

    def take_step(self, num_quiet: int) -> None:
        """Books the tokens of a step that are told later; `num_quiet` counts those of all steps so far.

        Each of their requests had a token in the step before too, so they all took the time between the two steps.
        """
        now, count = time.perf_counter(), num_quiet - self._num_quiet
        if count:
            with self.lock:
                self.between.observe(now - self._last_step, count)
                self.num_generation_tokens += count
        self._num_quiet, self.step_before, self._last_step = num_quiet, self._last_step, now

    def read(self, model_name: str, stats: EngineStats) -> list[Metric]:
        """Gives every metric as it stands, the engine's own from its statistics.

        Those of the engine come for each data rank, by the label `engine`. All else, the line included, is told with
        the first: sums over the label are right.
        """
        labels = {"model_name": model_name, "engine": "0"}

        def counter(name: str, value: int, **more: str) -> Counter:
            return Counter(name=PREFIX + name, labels={**labels, **more}, value=value)

        def gauges(name: str, values: Iterable[float]) -> list[Metric]:
            return [
                Gauge(name=PREFIX + name, labels={**labels, "engine": str(rank)}, value=value)
                for rank, value in enumerate(values)
            ]

        def counters(name: str, values: Iterable[int]) -> list[Metric]:
            return [
                Counter(name=name, labels={**labels, "engine": str(rank)}, value=value)
                for rank, value in enumerate(values)
            ]

        def histogram(name: str, tally: _Tally) -> Histogram:
            return tally.read(PREFIX + name, labels)

        def waiting_for(reason: str, count: int) -> list[Metric]:
            name = PREFIX + "num_requests_waiting_by_reason"
            return [Gauge(name=name, labels={**labels, "reason": reason}, value=count)]

        size = {"block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
        pool = Gauge(name=PREFIX + "cache_config_info", labels={**labels, **size}, value=1)
        computed_by_steps = sum([rank.num_step_tokens for rank in stats.ranks])
        with self.lock:
            computed = self.num_prompt_tokens - self.num_cached_tokens
            return [
                *gauges("num_requests_running", (rank.running for rank in stats.ranks)),
                *gauges("num_requests_waiting", (stats.waiting, *[0] * (len(stats.ranks) - 1))),
                *waiting_for("capacity", stats.waiting),
                *waiting_for("deferred", 0),  # the scheduler puts nobody off for another reason
                *gauges("kv_cache_usage_perc", (rank.kv_usage for rank in stats.ranks)),
                pool,
                *counters(PREFIX + "num_preemptions", (rank.num_preemptions for rank in stats.ranks)),
                *counters(PREFIX + "prefix_cache_queries", (rank.prefix_cache_queries for rank in stats.ranks)),
                *counters(PREFIX + "prefix_cache_hits", (rank.prefix_cache_hits for rank in stats.ranks)),
                *counters("jaxllm:step_tokens", (rank.num_step_tokens for rank in stats.ranks)),
                *counters("jaxllm:padding_tokens", (rank.num_padded_tokens for rank in stats.ranks)),
                _histogram(
                    PREFIX + "iteration_tokens_total", labels, STEP_SIZES, stats.steps_by_size, computed_by_steps
                ),
                counter("prompt_tokens", self.num_prompt_tokens),
                counter("prompt_tokens_cached", self.num_cached_tokens),
                counter("prompt_tokens_by_source", computed, source="local_compute"),
                counter("prompt_tokens_by_source", self.num_cached_tokens, source="local_cache_hit"),
                counter("generation_tokens", self.num_generation_tokens),
                *(counter("request_success", count, finished_reason=reason) for reason, count in self.ended.items()),
                histogram("time_to_first_token_seconds", self.first),
                histogram("inter_token_latency_seconds", self.between),
                histogram("request_time_per_output_token_seconds", self.mean),
                histogram("e2e_request_latency_seconds", self.whole),
                histogram("request_queue_time_seconds", self.queue),
                histogram("request_prefill_time_seconds", self.prefill),
                histogram("request_decode_time_seconds", self.decode),
                histogram("request_inference_time_seconds", self.inference),
                histogram("request_prompt_tokens", self.prompt_length),
                histogram("request_generation_tokens", self.output_length),
                histogram("request_max_num_generation_tokens", self.longest_output),
                histogram("request_prefill_kv_computed_tokens", self.prompt_computed),
                histogram("request_params_n", self.num_samples),
                histogram("request_params_max_tokens", self.max_tokens),
            ]


class _SampleMeter:
    """Times of one sample."""

    __slots__ = ("ended", "first", "last", "num_tokens")

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.num_tokens = 0
        self.ended = False


class RequestMeter:
    """Books one request from arrival to end. Prompt tokens count with its first token, others as they are given."""

    def __init__(self, books: RequestBooks, num_prompt_tokens: int, params: SamplingParams):
        self._books = books
        self._num_prompt_tokens = num_prompt_tokens
        self._params = params
        self._arrival = time.perf_counter()
        self._first_token: float | None = None
        self._last_token = 0.0
        self._time_in_queue: float | None = None
        self._num_cached_tokens = 0
        self._ended = False
        self._samples = [_SampleMeter() for _ in range(params.n)]

    def take(self, delta: OutputDelta, time_in_queue: float | None = None, num_counted: int = 0) -> None:
        """Books what came new for a sample, and with the first token how long the request waited.

        `num_counted` of the tokens have been booked by `RequestBooks.take_step`, with the times between them. From one
        of them to a token behind it counts the time of one step: a wait in between is not seen.
        """
        count = len(delta.token_ids)
        if not count and delta.finish_reason is None:
            return
        sample, books = self._samples[delta.index], self._books
        with books.lock:
            if count:
                now = time.perf_counter()
                if self._first_token is None:
                    self._first_token, self._time_in_queue = now, time_in_queue
                    self._num_cached_tokens = delta.num_cached_tokens
                    books.first.observe(now - self._arrival)
                    if time_in_queue is not None:
                        books.queue.observe(time_in_queue)
                    books.num_prompt_tokens += self._num_prompt_tokens
                    books.num_cached_tokens += delta.num_cached_tokens
                if sample.first is None:
                    sample.first = now
                elif count > num_counted:
                    books.between.observe(now - (books.step_before if num_counted else sample.last))
                sample.last = self._last_token = now
                sample.num_tokens += count
                books.num_generation_tokens += count - num_counted
            if delta.finish_reason is not None:
                self._end_sample(sample, delta.finish_reason)
                if all(each.ended for each in self._samples):
                    self._end()

    def end(self, reason: str) -> None:
        """Books the end of what has not ended yet."""
        with self._books.lock:
            for sample in self._samples:
                self._end_sample(sample, reason)
            self._end()

    def _end_sample(self, sample: _SampleMeter, reason: str) -> None:
        if sample.ended:
            return
        sample.ended = True
        books = self._books
        books.ended[reason] += 1
        books.output_length.observe(sample.num_tokens)
        if sample.first is not None and sample.num_tokens > 1:
            books.mean.observe((sample.last - sample.first) / (sample.num_tokens - 1))

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        books = self._books
        books.whole.observe(time.perf_counter() - self._arrival)
        if self._first_token is not None:
            decode = self._last_token - self._first_token
            books.decode.observe(decode)
            books.prompt_computed.observe(self._num_prompt_tokens - self._num_cached_tokens)
            if self._time_in_queue is not None:
                prefill = self._first_token - self._arrival - self._time_in_queue
                books.prefill.observe(prefill)
                books.inference.observe(prefill + decode)
        books.prompt_length.observe(self._num_prompt_tokens)
        books.longest_output.observe(max([sample.num_tokens for sample in self._samples]))
        books.num_samples.observe(self._params.n)
        if self._params.max_tokens is not None:
            books.max_tokens.observe(self._params.max_tokens)


def sizes_up_to(limit: int) -> Iterator[float]:
    """Buckets 1, 2, 5, 10, 20, 50, ... as vLLM has them."""
    power = 1
    while True:
        for step in (1, 2, 5):
            if step * power > limit:
                return
            yield step * power
        power *= 10
