import re
from pathlib import Path

from prometheus_client import generate_latest

from jaxllm.api.metrics import FINISH_REASONS, RequestBooks
from jaxllm.engine.messages import EngineStats
from jaxllm.server.metrics import make_registry

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def test_the_page_lists_exactly_the_metrics_that_a_server_has():
    exposed = generate_latest(make_registry(lambda: RequestBooks(1024).read("smollm2", EngineStats()))).decode()
    built = {(name, kind) for name, kind in re.findall(r"^# TYPE ((?:vllm|jaxllm):\S+) (\w+)$", exposed, re.MULTILINE)}
    listed = set(re.findall(r"^\| `((?:vllm|jaxllm):\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
    assert built
    assert listed == built


def test_the_page_names_every_reason_for_an_end():
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `vllm:request_success_total`"))
    assert set(FINISH_REASONS) <= set(re.findall(r"`(\w+)`", row))
