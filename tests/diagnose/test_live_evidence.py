"""A server's metrics over some seconds, written by the server's own registry."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import generate_latest

from jaxllm.api.metrics import RequestBooks
from jaxllm.api.outputs import OutputDelta
from jaxllm.cli import main
from jaxllm.config.errors import InputError
from jaxllm.diagnose.live_evidence import evidence_between, gauges_of, observe, parse, watch
from jaxllm.diagnose.rules import diagnose
from jaxllm.engine.messages import EngineStats, RankStats
from jaxllm.server.metrics import make_registry


class Server:
    """Stands in for a server: books tokens as they come, and tells its metrics as Prometheus reads them."""

    def __init__(self, running=0, waiting=0, kv_usage=0.0, ranks=1):
        self.running = running * ranks
        self.stats = EngineStats(
            waiting=waiting, ranks=tuple(RankStats(running=running, kv_usage=kv_usage) for _ in range(ranks))
        )
        self.books = RequestBooks(4096)
        self.registry = make_registry(lambda: self.books.read("model", self.stats))

    def text(self):
        return generate_latest(self.registry).decode()

    def give_tokens(self, count, gap):
        """Gives every running request so many tokens, `gap` seconds apart."""
        for _ in range(self.running):
            meter = self.books.start(32)
            for _ in range(count):
                meter.take(OutputDelta(index=0, token_ids=(1,), text=""))
            with self.books.lock:
                self.books.between._sum = gap * sum(self.books.between._counts)


def seen(server, gap=0.01):
    """A second, in which each request that runs is given ten tokens."""
    first = parse(server.text())
    server.give_tokens(10, gap)
    last = parse(server.text())
    return evidence_between(first, last, [gauges_of(first), gauges_of(last)], 1.0, "server")


def test_a_reading_is_the_same_whatever_stands_before_vllms_names():
    server = Server(20, 30, 0.98, ranks=2)
    server.give_tokens(3, 0.01)
    plain = parse(server.text())
    for prefix in ("our:", ""):
        server.registry = make_registry(lambda: server.books.read("model", server.stats), prefix)
        assert {name: parse(server.text())[name] for name in plain if not name.startswith("jaxllm:")} == {
            name: value for name, value in plain.items() if not name.startswith("jaxllm:")
        }


def test_an_idle_server_has_no_limit():
    evidence = seen(Server())
    assert (evidence.running, evidence.busy, evidence.output_rate) == (0.0, 0.0, 0.0)
    assert diagnose(evidence).kind == "none"


def test_a_full_pool_with_a_queue_is_memory_and_a_queue_beside_free_blocks_is_rows():
    assert diagnose(seen(Server(20, 30, 0.98))).kind == "memory"
    found = diagnose(seen(Server(16, 30, 0.2)))
    assert found.kind == "scheduling"
    assert found.change == "--max-num-seqs 64"
    assert diagnose(seen(Server(256, 100, 0.3))).kind == "compute"


def test_data_ranks_are_told_as_one_of_them():
    evidence = seen(Server(16, 60, 0.2, ranks=2), 0.05)
    assert (evidence.copies, evidence.running, evidence.waiting, evidence.rows) == (2, 16, 30, 16)
    assert evidence.kv_peak == pytest.approx(0.2)
    assert diagnose(evidence).change == "--max-num-seqs 64"
    assert seen(Server(4, 0, 0.2, ranks=2), 0.05).busy == pytest.approx(0.5, rel=0.15)


def test_steps_of_which_few_are_needed_leave_the_server_idle():
    # Ten steps a second, of 10 ms, of 50 ms, and of 95 ms each.
    server = Server(4, 0, 0.05)
    for gap, busy, kind in ((0.01, 0.1, "none"), (0.05, 0.5, "input"), (0.095, 0.95, "none")):
        evidence = seen(Server(4, 0, 0.05), gap)
        assert evidence.output_rate == 40
        assert evidence.busy == pytest.approx(busy, rel=0.15)  # ten tokens have nine gaps between them
        assert diagnose(evidence).kind == kind
    assert observe(lambda: parse(server.text()), 0.01, "server", pause=time.sleep).running == 4


@pytest.fixture
def address():
    server = Server(running=16, waiting=40, kv_usage=0.1)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self):
            body = server.text().encode() if self.path == "/metrics" else b"hello"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    http = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()


def test_the_command_watches_a_server(address, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", address, "--seconds", "0.1"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "scheduling: all 16 rows are in use and requests wait" in out
    assert "change: --max-num-seqs 64" in out


def test_a_mistake_is_one_line(address, tmp_path):
    with pytest.raises(InputError, match="does not answer"):
        watch("http://127.0.0.1:9", 0.1)
    with pytest.raises(InputError, match="gives no metrics"):
        watch(address + "/other", 0.1)
    from jaxllm.diagnose.bench_evidence import read_bench

    with pytest.raises(InputError, match="cannot be read"):
        read_bench("/nowhere.json")
    for content, said in (("{", "is no JSON"), ("[]", "has no figures"), ('{"results": [{}]}', "has no figures")):
        (tmp_path / "file.json").write_text(content)
        with pytest.raises(InputError, match=said):
            read_bench(str(tmp_path / "file.json"))
