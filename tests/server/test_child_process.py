"""A process and its parent: orders, reports, and that neither outlives the other unnoticed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxllm.server.child_process import ChildProcess

ECHO = """
import threading
from jaxllm.server.child_process import Parent
parent = Parent()
over = threading.Event()
def take(order):
    parent.report(**order)
    if "stop" in order: over.set()
parent.report(first=parent.order)
parent.listen(take)
over.wait()
"""
STARTER = """
import os, sys, time
from jaxllm.server.child_process import ChildProcess
child = ChildProcess(("-c", sys.argv[1]), {})
print(child.pid, flush=True)
time.sleep(60)
"""


def test_orders_arrive_reports_come_back_and_the_end_is_described():
    child = ChildProcess(("-c", ECHO), {"a": 1})
    child.tell({"b": [2]})
    reports = child.reports()
    assert [next(reports), next(reports)] == [{"first": {"a": 1}}, {"b": [2]}]
    assert child.stop()
    assert child.wait() == "ended with exit code 0"
    assert child.has_ended_well


def test_a_process_that_does_not_end_when_told_is_killed():
    child = ChildProcess(("-c", "import time; time.sleep(60)"), {})
    assert not child.stop(0.1)
    assert child.wait() == "was killed by signal 9 (SIGKILL)"


def test_a_parent_that_is_killed_leaves_no_child():
    starter = subprocess.Popen([sys.executable, "-c", STARTER, ECHO], stdout=subprocess.PIPE, text=True)
    with starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        os.kill(pid, 0)
        starter.kill()
    deadline = time.monotonic() + 10
    while lives(pid):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Says whether a process runs; one that has ended may wait for whoever adopted it to take note."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_signal_reaches_the_child_alone():
    child = ChildProcess(("-c", ECHO), {})
    next(child.reports())
    child.signal(signal.SIGTERM)
    assert child.wait() == "was killed by signal 15 (SIGTERM)"
