import logging
import re
import threading
import time

import pytest

from jaxllm.engine.watchdog import Watchdog


@pytest.fixture
def watch():
    """Makes watchdogs and ends them."""
    made = []

    def make(timeout):
        made.append(Watchdog(timeout))
        return made[-1]

    yield make
    for watchdog in made:
        watchdog.close()


def wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_a_late_body_is_named_and_forgotten_when_it_returns(watch, caplog):
    watchdog = watch(0.05)
    with caplog.at_level(logging.WARNING):
        with watchdog.watching(lambda: "step 7 (decode T=8)"):
            assert watchdog.overdue is None
            wait_for(lambda: watchdog.overdue)
            assert watchdog.overdue is not None
            late = r"step 7 \(decode T=8\) has not returned for \d+\.\d s \(step_timeout 0\.05 s\)"
            assert re.fullmatch(late, watchdog.overdue)
        assert watchdog.overdue is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "hanging: step 7" in caplog.text
    assert "went on after all: step 7" in caplog.text


def test_a_body_in_time_is_never_described(watch):
    watchdog, described = watch(30.0), []
    for step in range(100):
        with watchdog.watching(lambda step=step: described.append(step) or ""):
            pass
    assert watchdog.overdue is None
    assert not described


def test_it_goes_on_watching_after_a_late_one(watch):
    watchdog = watch(0.03)
    for name in ("first", "second"):
        with watchdog.watching(lambda name=name: name):
            wait_for(lambda: watchdog.overdue)
            assert str(watchdog.overdue).startswith(name)
        assert watchdog.overdue is None


def test_a_body_that_raises_is_no_longer_watched(watch):
    watchdog = watch(0.03)
    with pytest.raises(RuntimeError, match="lost"), watchdog.watching(lambda: "step 1"):
        raise RuntimeError("lost")
    time.sleep(0.15)
    assert watchdog.overdue is None


def test_a_body_that_ends_while_it_is_described_does_not_stay_overdue(watch):
    watchdog, described = watch(0.03), threading.Event()

    def describe():
        described.set()
        time.sleep(0.05)  # the body returns meanwhile
        return "step 1"

    with watchdog.watching(describe):
        assert described.wait(10)
    time.sleep(0.1)
    assert watchdog.overdue is None


def test_closing_ends_its_thread(watch):
    watchdog = watch(60.0)
    threads = [thread for thread in threading.enumerate() if thread.name == "jaxllm-watchdog" and thread.is_alive()]
    watchdog.close()
    assert sum(thread.is_alive() for thread in threads) == len(threads) - 1
