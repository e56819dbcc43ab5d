import re
from pathlib import Path

from prometheus_client import generate_latest

from jaxllm.engine.messages import EngineStats
from jaxllm.server.metrics import FINISH_REASONS, ServerMetrics

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_page_lists_exactly_the_metrics_that_a_server_has():
    exposed = generate_latest(ServerMetrics("smollm2", 1024, EngineStats).registry).decode()
    built = {(name, kind) for name, kind in re.findall(r"^# TYPE (vllm:\S+) (\w+)$", exposed, re.MULTILINE)}
    built = {(name, kind) for name, kind in built if not name.endswith("_created")}
    listed = set(re.findall(r"^\| `(vllm:\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    assert built
    assert listed == built


def test_the_page_names_every_reason_for_an_end():
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `vllm:request_success_total`"))
    assert set(FINISH_REASONS) <= set(re.findall(r"`(\w+)`", row))
