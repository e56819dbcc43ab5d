"""Several fronts tell Prometheus the same: what the requests of all were given."""

from pathlib import Path

from jaxllm import SamplingParams
from jaxllm.api.metrics import Counter, Gauge, Histogram, Metric, RequestBooks
from jaxllm.api.outputs import OutputDelta
from jaxllm.engine.messages import EngineStats, RankStats
from jaxllm.server.peer_books import PeerBooks

STATS = EngineStats(waiting=2, ranks=(RankStats(running=3, num_preemptions=7),))


def read(metrics: list[Metric], name: str) -> Metric:
    (found,) = (metric for metric in metrics if metric.name == f"vllm:{name}")
    return found


def test_requests_of_all_fronts_are_added_up_and_the_engines_figures_told_once(tmp_path: Path):
    books = [RequestBooks(100) for _ in range(3)]
    peers = [PeerBooks(tmp_path, index, 3) for index in range(3)]
    for index in range(2):  # the third has not written yet
        for _ in range(index + 1):
            meter = books[index].start(5, SamplingParams(max_tokens=8))
            meter.take(OutputDelta(token_ids=(1, 2), num_output_tokens=2), 0.5)
            meter.end("length")
        peers[index].write(books[index], "m")
    for own, beside in zip(books, peers, strict=True):
        metrics = beside.add(own.read("m", STATS))
        tokens, lengths = read(metrics, "generation_tokens"), read(metrics, "request_generation_tokens")
        assert isinstance(tokens, Counter)
        assert isinstance(lengths, Histogram)
        assert (tokens.value, lengths.count, lengths.sum, lengths.buckets["+Inf"]) == (6, 3, 6.0, 3)
        running, preempted = read(metrics, "num_requests_running"), read(metrics, "num_preemptions")
        assert isinstance(running, Gauge)
        assert isinstance(preempted, Counter)
        assert (running.value, preempted.value) == (3, 7)
        assert len(metrics) == len(own.read("m", STATS))
