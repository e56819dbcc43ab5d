"""Processes that meet agree, or are told in one line why not."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from jaxllm.config.errors import InputError
from jaxllm.engine.processes.channel import Channel
from jaxllm.engine.processes.handshake import meet
from jaxllm.engine.processes.messages import Facts, Stop

FLAGS = {"version of jax": "1", "max_num_seqs": "16"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(port: int) -> Iterator[Callable[..., Future]]:
    """Lets a process come, on a thread of its own."""
    came: list[Future] = []

    def begin(rank: int, count: int = 2, flags: dict | None = None, timeout: float = 10) -> Future:
        future: Future = Future()
        came.append(future)

        def run() -> None:
            try:
                future.set_result(meet(rank, count, "127.0.0.1", port, flags or FLAGS, timeout))
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future

    yield begin
    channels = [future.result() for future in came if future.done() and future.exception() is None]
    for channel in channels:
        channel.expect_end()  # a loss would end the process, tests included
    for channel in channels:
        channel.close()


def refusals(*processes: Future) -> set[str]:
    errors = [process.exception(10) for process in processes]
    assert all(isinstance(error, InputError) for error in errors)
    return {str(error) for error in errors}


def test_messages_reach_the_other_side_whole_and_in_order(start: Callable):
    followers = [start(1, 3), start(2, 3)]
    leader: Channel = start(0, 3).result(10)
    for rank, follower in enumerate(followers, 1):
        channel: Channel = follower.result(10)
        assert channel.hosts == [socket.gethostname()] * 3
        large = Facts({"x": "y" * 3_000_000}, rank)
        channel.send(large)
        channel.send(Stop())
        assert leader.receive(rank, 10) == large
        assert leader.receive(rank, 10) == Stop()
    leader.send(Facts({}, 5))
    assert [follower.result().receive(0, 10) for follower in followers] == [Facts({}, 5)] * 2


def test_a_flag_that_differs_is_named_to_every_process(start: Callable):
    reasons = refusals(start(0), start(1, flags=FLAGS | {"max_num_seqs": "8"}))
    here = socket.gethostname()
    assert reasons == {
        f"process 1 on {here} has max_num_seqs=8, process 0 has max_num_seqs=16: start all processes with the same"
    }


def test_another_number_of_processes_is_named(start: Callable):
    (reason,) = refusals(start(0), start(1, 3))
    assert "has nnodes=3, process 0 has nnodes=2" in reason


def test_two_processes_of_one_rank_are_told(start: Callable):
    leader, first = start(0, 3), start(1, 3)
    second = start(1, 3)
    (reason,) = refusals(leader, first, second)
    assert "two processes have node_rank=1" in reason


def test_a_process_that_does_not_come_is_named(start: Callable, port: int):
    (reason,) = refusals(start(0, 3, timeout=1), start(2, 3))
    assert "did not come within 1 s (distributed_timeout_seconds): 1;" in reason
    assert f"ports {port - 1} and {port}" in reason


def test_a_process_without_process_0_says_where_it_looked(start: Callable, port: int):
    (reason,) = refusals(start(1, timeout=1))
    assert f"cannot reach process 0 at 127.0.0.1:{port}" in reason


def test_a_port_that_is_taken_is_told(start: Callable, port: int):
    with socket.create_server(("127.0.0.1", port)):
        (reason,) = refusals(start(0))
    assert f"cannot listen on port {port}" in reason


def test_a_stranger_is_sent_away_and_nobody_waits_for_it(start: Callable, port: int, caplog: pytest.LogCaptureFixture):
    leader = start(0)
    with caplog.at_level(logging.WARNING):
        while True:
            try:
                stranger = socket.create_connection(("127.0.0.1", port), 1)
                break
            except OSError:
                continue
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
    follower = start(1)
    assert leader.result(10).peers == [1]
    assert follower.result(10).peers == [0]
    assert "is no process of this engine" in caplog.text
