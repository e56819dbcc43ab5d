"""How often an engine's process is started again, and what is told when it is not. The engines are a line of Python."""

import queue
from pathlib import Path

import pytest
import zmq

from jaxllm.config.engine_args import EngineArgs
from jaxllm.config.server_args import ServerArgs
from jaxllm.engine.addresses import front_address
from jaxllm.engine.wire import Died, Ended, decode_to_front
from jaxllm.server.engine_supervisor import EngineEnd, EngineSupervisor

START = "from jaxllm.server.child_process import Parent; parent = Parent(); "


def ends_of(folder: Path, program: str, args: EngineArgs | None = None) -> tuple[EngineEnd, list[object]]:
    """Runs engines until no other is started; gives why, and what a front was told."""
    ends: queue.SimpleQueue[EngineEnd] = queue.SimpleQueue()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as front:
        front.bind(front_address(folder, 0))
        supervisor = EngineSupervisor(
            args or EngineArgs(),
            ServerArgs(),
            folder,
            on_end=ends.put,
            on_leave=lambda: None,
            command=("-c", START + program),
        )
        end = ends.get(timeout=30)
        told = []
        while not told or not isinstance(told[-1], Ended):
            assert front.poll(10_000), "the front was not told of the end"
            told.append(decode_to_front(front.recv_multipart()[1]))
        assert supervisor.stop()
        assert supervisor.end == end
        return end, told


def test_the_fourth_death_in_a_short_time_is_the_last(tmp_path: Path):
    end, told = ends_of(tmp_path, "parent.report(ready=True); parent.report(died='MemoryError: no room'); exit(1)")
    assert [type(message) for message in told] == [Died, Died, Died, Ended]
    assert "ended with exit code 1 (MemoryError: no room), the 4th end within" in end.line
    assert not end.is_refusal
    assert not end.is_told


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("parent.report(refused='no such model'); exit(2)", EngineEnd("no such model", is_refusal=True)),
        ("exit(1)", EngineEnd("the engine's process ended with exit code 1 while it started", is_told=True)),
        (
            "import os; os.kill(os.getpid(), 9)",
            EngineEnd("the engine's process was killed by signal 9 (SIGKILL) while it started"),
        ),
        (
            "parent.report(ready=True); parent.report(lost='process 1 is gone'); exit(1)",
            EngineEnd("process 1 is gone", is_told=True),
        ),
    ],
)
def test_an_engine_that_cannot_start_or_has_lost_others_is_not_started_again(
    tmp_path: Path, program: str, expected: EngineEnd
):
    end, told = ends_of(tmp_path, program)
    assert end == expected
    assert told == [Ended(expected.line)]


def test_the_engine_of_several_hosts_is_not_started_again(tmp_path: Path):
    args = EngineArgs(nnodes=2, master_addr="127.0.0.1")
    end, _ = ends_of(tmp_path, "parent.report(ready=True); import os; os.kill(os.getpid(), 9)", args)
    assert (
        end.line
        == "the engine's process was killed by signal 9 (SIGKILL), and the engine's other processes end with it"
    )
