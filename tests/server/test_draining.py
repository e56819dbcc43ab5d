import signal
import threading
import time
from typing import Any

import httpx

BODY = {"prompt": "abc", "stream_options": {"include_usage": True}}


def start_streams(app: Any, count: int, max_tokens: int) -> tuple[list[threading.Thread], list[list[Any]]]:
    """Starts streams; gives their threads and the lists in which their events will be."""
    answers: list[list[Any]] = [[] for _ in range(count)]

    def follow(events: list[Any]) -> None:
        events += app.events("completions", {**BODY, "max_tokens": max_tokens})

    threads = [threading.Thread(target=follow, args=(events,)) for events in answers]
    for thread in threads:
        thread.start()
    app.wait_for(lambda: app.llm.stats.running == count)
    return threads, answers


def is_refused(app: Any) -> bool:
    try:
        httpx.get(app.url + "/health", timeout=5.0)
    except httpx.ConnectError:
        return True
    return False


def test_running_requests_end_while_new_ones_are_refused(serve_app: Any, tokenizer: Any):
    with serve_app(tokenizer=tokenizer, drain_seconds=20.0) as app:
        app.runner.step_seconds = 0.03
        threads, answers = start_streams(app, 4, max_tokens=50)
        app.server.handle_exit(signal.SIGTERM, None)
        app.wait_for(lambda: is_refused(app))
        assert all(thread.is_alive() for thread in threads)
        app.thread.join(20)
        assert not app.thread.is_alive()
        for thread in threads:
            thread.join(5)
    assert [events[-2]["choices"][0]["finish_reason"] for events in answers] == ["length"] * 4
    assert [events[-1]["usage"]["completion_tokens"] for events in answers] == [50] * 4


def test_what_still_runs_at_the_end_of_the_time_is_aborted_and_told_so(serve_app: Any, tokenizer: Any):
    with serve_app(tokenizer=tokenizer, drain_seconds=0.5) as app:
        app.runner.step_seconds = 0.05
        threads, answers = start_streams(app, 4, max_tokens=120)
        start = time.monotonic()
        app.server.handle_exit(signal.SIGTERM, None)
        app.thread.join(20)
        assert 0.5 <= time.monotonic() - start < 5
        for thread in threads:
            thread.join(5)
        assert app.is_empty()
    assert [events[-2]["choices"][0]["finish_reason"] for events in answers] == ["abort"] * 4
    assert all(5 < events[-1]["usage"]["completion_tokens"] < 120 for events in answers)


def test_an_idle_server_stops_at_once(serve_app: Any, tokenizer: Any):
    with serve_app(tokenizer=tokenizer, drain_seconds=20.0) as app:
        app.client.get("/health")  # leaves an open connection behind
        start = time.monotonic()
        app.server.handle_exit(signal.SIGINT, None)
        app.thread.join(20)
        assert time.monotonic() - start < 5
