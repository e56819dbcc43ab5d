"""A server's /metrics, read for some seconds -> evidence. Knows vLLM's names of metrics; judges nothing.

Counters say what came in between, gauges are read again and again. The metrics have no times of the host's work, and
no max_num_seqs: while requests wait beside free KV blocks, the most that ran at once stands for it.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import httpx

from jaxllm.config.errors import InputError
from jaxllm.diagnose.evidence import Evidence

_INTERVAL = 0.25  # seconds between two readings
_FULL = 0.9  # of the KV pool
_RANKS = "_ranks"
_RUNNING = "num_requests_running"

Reading = Mapping[str, float]  # by name, summed over labels


class Gauges(NamedTuple):
    """One look: means of the data ranks."""

    running: float
    waiting: float
    kv: float


def watch(url: str, seconds: float) -> Evidence:
    """Reads a server's metrics for so many seconds.

    Raises:
        InputError: it does not answer, or what it answers are no metrics of an engine.
    """
    address = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1") + "/metrics"
    with httpx.Client(timeout=10.0) as client:
        return observe(lambda: _read(client, address), seconds, url)


def observe(
    read: Callable[[], Reading], seconds: float, name: str, pause: Callable[[float], None] = time.sleep
) -> Evidence:
    """Reads for so many seconds and draws the evidence."""
    begin, first = time.perf_counter(), read()
    looks, last = [gauges_of(first)], first
    while time.perf_counter() - begin < seconds:
        pause(_INTERVAL)
        last = read()
        looks.append(gauges_of(last))
    return evidence_between(first, last, looks, max(time.perf_counter() - begin, 1e-9), name)


def evidence_between(first: Reading, last: Reading, looks: list[Gauges], seconds: float, name: str) -> Evidence:
    """Draws the evidence from two readings and the gauges between them."""

    def grown(metric: str) -> float:
        return last.get(metric, 0.0) - first.get(metric, 0.0)

    def mean_ms(metric: str) -> float | None:
        count = grown(f"{metric}_count")
        return 1e3 * grown(f"{metric}_sum") / count if count > 0 else None

    at_work = [look.running for look in looks if look.running > 0]
    running = statistics.fmean(at_work) if at_work else 0.0
    waiting = statistics.fmean(look.waiting for look in looks)
    tokens, between = grown("vllm:generation_tokens_total"), mean_ms("vllm:inter_token_latency_seconds")
    busy = None
    if waiting >= 1:  # it waits in the engine, which steps as long as something does
        busy = 1.0
    elif between is not None and running:  # a step gives each running request a token, one gap after the last
        busy = min(1.0, tokens / running / last.get(_RANKS, 1) * between / 1e3 / seconds)
    elif not running:
        busy = 0.0
    kv_peak = max(look.kv for look in looks)
    rows = round(max(at_work)) if at_work and waiting >= 1 and kv_peak < _FULL else None
    ended = grown("vllm:request_success_total")
    return Evidence(
        name=name,
        seconds=seconds,
        num_requests=round(max(ended, running)),
        num_prompt_tokens=round(grown("vllm:prompt_tokens_total")),
        num_output_tokens=round(tokens),
        running=running,
        waiting=waiting,
        copies=round(last.get(_RANKS, 1)),
        rows=rows,
        busy=busy,
        kv_peak=kv_peak,
        num_preemptions=round(grown("vllm:num_preemptions_total")),
        tpot_ms=mean_ms("vllm:request_time_per_output_token_seconds") or between,
        ttft_ms=mean_ms("vllm:time_to_first_token_seconds"),
    )


def parse(text: str) -> Reading:
    """Reads Prometheus' text. Series of one name are summed; `_ranks` counts those of the engine's gauges.

    Whatever stands before vLLM's names there (--metrics-prefix), here they begin with vllm:.

    Raises:
        ValueError: it is none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    ranks = 0
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    known = next((sample.name for sample in samples if sample.name.endswith(_RUNNING)), _RUNNING)
    prefix = known.removesuffix(_RUNNING)
    for sample in samples:
        if not sample.name.endswith("_bucket"):
            name = "vllm:" + sample.name[len(prefix) :] if sample.name.startswith(prefix) else sample.name
            found[name] = found.get(name, 0.0) + sample.value
            ranks += name == "vllm:" + _RUNNING
    return found | {_RANKS: max(ranks, 1)}


def gauges_of(reading: Reading) -> Gauges:
    """Takes the gauges out of a reading, as the mean of the data ranks."""
    names, ranks = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), reading.get(_RANKS, 1.0)
    return Gauges(*(reading[f"vllm:{name}"] / ranks for name in names))


def _read(client: httpx.Client, address: str) -> Reading:
    try:
        response = client.get(address)
        response.raise_for_status()
        reading = parse(response.text)
    except httpx.HTTPStatusError as error:
        raise InputError(f"{address} answers {error.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"{address} does not answer: {error or type(error).__name__}") from None
    except ValueError as error:
        raise InputError(f"{address} gives no metrics: {error}") from None
    if "vllm:num_requests_running" not in reading:
        raise InputError(f"{address} gives no metrics of an engine: vllm:num_requests_running is missing")
    return reading
