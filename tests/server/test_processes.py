"""The server's processes, with an engine's stand-in whose texts are known: see scripts/bench_front.py."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_front.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_front", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_front"] = module
    spec.loader.exec_module(module)
    return module


bench = load_script()


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """Two fronts over a stand-in that gives each stream 40 tokens a second."""
    server = bench.Server(bench.TOKENS_PER_SECOND, num_fronts=2)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.end()


def children(server: Any, module: str) -> list[psutil.Process]:
    """The server's processes of a kind; those of the stand-in are named by its script."""
    found = psutil.Process(server.process.pid).children()
    return [each for each in found if module in " ".join(each.cmdline())]


def read_stream(port: int, max_tokens: int, on_piece: Callable[[], None] = lambda: None) -> tuple[str, int, str | None]:
    """Follows a stream to its end: text, tokens told in usage, and the error if it ended with one."""
    text, num_tokens, error = [], 0, None
    body = {"prompt": "Once", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with (
        httpx.Client(timeout=60.0) as client,
        client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as response,
    ):
        try:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                error = event.get("error", {}).get("message", error)
                text += [choice["text"] for choice in event.get("choices", ())]
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                on_piece()
        except httpx.RemoteProtocolError as lost:
            error = str(lost)
    return "".join(text), num_tokens, error


def read_metric(port: int, name: str) -> float:
    """Asks whichever front answers."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return float(next(line for line in text.splitlines() if line.startswith(name + "{")).split()[-1])


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def test_100_streams_go_on_where_they_were_when_the_engine_is_killed(server: Any):
    (engine,) = children(server, "bench_front.py engine")
    begun: set[int] = set()
    with ThreadPoolExecutor(100) as pool:
        streams = [
            pool.submit(read_stream, server.port, 120, lambda index=index: begun.add(index)) for index in range(100)
        ]
        wait_for(lambda: len(begun) == 100)
        engine.kill()
        engine.wait(10)
        time.sleep(0.2)
        health = httpx.get(f"http://127.0.0.1:{server.port}/health")
        results = [stream.result(60) for stream in streams]
    texts = {text for text, _, _ in results}
    assert len(texts) == 1
    assert next(iter(texts)).startswith(bench.TEXT)
    assert {(num_tokens, error) for _, num_tokens, error in results} == {(120, None)}
    assert (health.status_code, "killed by signal 9" in health.text) == (503, True)
    assert httpx.get(f"http://127.0.0.1:{server.port}/health").status_code == 200
    time.sleep(0.5)  # in which each front writes its books
    assert [read_metric(server.port, "vllm:generation_tokens_total") for _ in range(4)] == [100 * 120] * 4


def test_a_front_that_dies_takes_its_requests_along_and_no_others(server: Any):
    (_, victim) = children(server, "front_process")
    (engine,) = children(server, "bench_front.py engine")

    def running() -> float:
        return read_metric(server.port, "vllm:num_requests_running")

    with ThreadPoolExecutor(20) as pool:
        streams = [pool.submit(read_stream, server.port, 120) for _ in range(20)]
        wait_for(lambda: running() == 20)
        victim.kill()
        results = [stream.result(60) for stream in streams]
    ended = [num_tokens for _, num_tokens, error in results if error is None]
    assert 0 < len(ended) < 20
    assert set(ended) == {120}
    wait_for(lambda: len(children(server, "front_process")) == 2 and running() == 0)
    assert children(server, "bench_front.py engine") == [engine]


def test_load_on_the_fronts_does_not_hold_up_the_engine(server: Any):
    """Limits for a machine with other work; the script measures what docs/serving.md tells."""
    alone = (time.monotonic(), time.monotonic() + 1.0)
    time.sleep(1.0)
    loaded, _, num_long = bench.load(server.port, 1.5, 64)
    assert num_long > 0
    ticks = server.end()
    assert server.process.returncode == 0
    alone_gaps, loaded_gaps = bench.gaps(ticks, *alone), bench.gaps(ticks, *loaded)
    assert len(loaded_gaps) > 300
    assert bench.percentile(loaded_gaps, 99) < bench.percentile(alone_gaps, 99) + 30.0  # milliseconds
