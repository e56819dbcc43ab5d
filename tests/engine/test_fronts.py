"""An engine's fronts: whose request is whose, and one that does not read holds nobody up."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from jaxllm import SamplingParams
from jaxllm.engine import fronts as fronts_module
from jaxllm.engine.addresses import engine_address, front_address
from jaxllm.engine.fronts import Fronts
from jaxllm.engine.limits import EngineLimits
from jaxllm.engine.messages import AbortRequests, AddRequest, EngineCall, EngineReply, EngineStats, Message
from jaxllm.engine.wire import (
    News,
    Overrun,
    Ready,
    as_wire,
    decode_to_front,
    encode,
    plain_limits,
    read_updates,
)
from jaxllm.scheduler.request import RequestUpdate


class Loop:
    """Stands in for the engine's loop: keeps what it is sent."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.inbox: list[Message] = []

    def send(self, message: Message) -> None:
        self.inbox.append(message)


class Front:
    """A front's two sockets."""

    def __init__(self, context: zmq.Context, folder: Path, index: int):
        self._inbound = context.socket(zmq.ROUTER)
        self._inbound.setsockopt(zmq.RCVHWM, 200)
        self._inbound.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._inbound.bind(front_address(folder, index))
        self._outbound = context.socket(zmq.DEALER)
        self._outbound.setsockopt(zmq.IDENTITY, f"{index}-1".encode())
        self._outbound.connect(engine_address(folder, 0))

    def send(self, message: Message) -> None:
        self._outbound.send(encode(as_wire(message)))

    def read(self) -> Any:
        assert self._inbound.poll(10_000), "nothing came"
        return decode_to_front(self._inbound.recv_multipart()[1])

    def is_empty(self) -> bool:
        return not self._inbound.poll(50)

    def close(self) -> None:
        self._inbound.close(0)
        self._outbound.close(0)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fronts, Loop, list[Front]]]:
    monkeypatch.setattr(fronts_module, "MOST_WAITING", 200)
    loop = Loop()
    with zmq.Context() as context:
        ends = [Front(context, tmp_path, index) for index in range(2)]
        fronts = Fronts(tmp_path, 0, 2)
        limits = plain_limits(EngineLimits(vocab_size=9, max_model_len=9))
        fronts.serve(cast(Any, loop), Ready(0, *limits, {}, None))
        assert all(isinstance(end.read(), Ready) for end in ends)
        yield fronts, loop, ends
        fronts.close()
        for end in ends:
            end.close()


def add(name: str) -> AddRequest:
    return AddRequest(name, [1, 2], SamplingParams(max_tokens=100))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


def test_each_front_hears_of_its_own_requests_and_calls_alone(parts: tuple[Fronts, Loop, list[Front]]):
    fronts, loop, ends = parts
    for index, end in enumerate(ends):
        end.send(add(f"{index}/a"))
        end.send(EngineCall(7, "is_paused"))
    wait_for(lambda: len(loop.inbox) == 4)
    calls = [message.call_id for message in loop.inbox if isinstance(message, EngineCall)]
    assert len(set(calls)) == 2  # though both fronts counted alike
    tokens = [RequestUpdate(f"{index}/a", (5 + index,), num_output_tokens=2) for index in range(2)]
    fronts.publish([*tokens, RequestUpdate("unknown", (1,)), *(EngineReply(each, "yes") for each in calls)])
    for index, end in enumerate(ends):
        news = end.read()
        assert isinstance(news, News)
        assert [(update.request_id, update.token_ids) for update in read_updates(news)] == [
            (f"{index}/a", (5 + index,))
        ]
        assert news.replies == [EngineReply(7, "yes")]


def test_a_front_that_does_not_read_loses_its_requests_and_holds_nobody_up(parts: tuple[Fronts, Loop, list[Front]]):
    fronts, loop, (stuck, other) = parts
    stuck.send(add("0/a"))
    other.send(add("1/a"))
    wait_for(lambda: len(loop.inbox) == 2)
    longest, num_steps = 0.0, 0
    while AbortRequests(("0/a",)) not in loop.inbox:
        num_steps += 1
        assert num_steps < 100_000, "what waits for a front has no bound"
        begin = time.perf_counter()
        fronts.publish([RequestUpdate(f"{i}/a", (num_steps,), num_output_tokens=num_steps) for i in range(2)])
        longest = max(longest, time.perf_counter() - begin)
        assert read_updates(other.read())[0].token_ids == (num_steps,)
    assert longest < 1.0
    assert loop.inbox[2:] == [AbortRequests(("0/a",))]
    fronts.publish([RequestUpdate("0/a", finish_reason="abort"), RequestUpdate("1/a", (0,), "length")])
    assert read_updates(other.read())[0].finish_reason == "length"
    num_read = 0
    while not stuck.is_empty():
        assert isinstance(stuck.read(), News)
        num_read += 1
    assert num_read < num_steps + 1
    fronts.tell(None, True)
    assert isinstance(stuck.read(), Overrun)


def test_a_front_that_is_replaced_loses_its_requests_and_the_next_one_is_greeted(
    parts: tuple[Fronts, Loop, list[Front]],
):
    fronts, loop, ends = parts
    ends[0].send(add("0/a"))
    ends[1].send(add("1/a"))
    wait_for(lambda: len(loop.inbox) == 2)
    fronts.replace_front(1)
    assert loop.inbox[2:] == [AbortRequests(("1/a",))]
    assert isinstance(ends[1].read(), Ready)
    assert ends[0].is_empty()
