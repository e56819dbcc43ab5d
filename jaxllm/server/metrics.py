"""An engine's metrics as Prometheus reads them. Knows names and numbers; what is counted stands in api/metrics.py."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from jaxllm.api.metrics import DESCRIPTIONS, PREFIX, Counter, Gauge, Histogram, Metric


def make_registry(read: Callable[[], Sequence[Metric]], prefix: str = PREFIX) -> CollectorRegistry:
    """Makes a registry that reads the metrics whenever Prometheus asks; vLLM's names get another prefix if you like."""
    registry = CollectorRegistry()
    registry.register(_MetricsCollector(read, prefix))
    return registry


class _MetricsCollector(Collector):
    """Shapes readings as families: those of one name lie beside each other."""

    def __init__(self, read: Callable[[], Sequence[Metric]], prefix: str):
        self._read = read
        self._prefix = prefix

    def collect(self) -> Iterable[Family]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        for metric in self._read():
            labels = list(metric.labels.values())
            family = families.get(metric.name)
            if family is None:
                plain = metric.name.removeprefix(PREFIX)
                name = metric.name if plain == metric.name else self._prefix + plain
                kind = _KINDS[type(metric)]
                family = families[metric.name] = kind(name, DESCRIPTIONS[plain], labels=list(metric.labels))
            if isinstance(metric, Histogram):
                assert isinstance(family, HistogramMetricFamily)
                family.add_metric(labels, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, Counter | Gauge):
                assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
                family.add_metric(labels, metric.value)
        return families.values()


_KINDS = {Counter: CounterMetricFamily, Gauge: GaugeMetricFamily, Histogram: HistogramMetricFamily}
