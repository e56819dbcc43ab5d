"""Measures the HTTP front over an engine's stand-in: python scripts/bench_front.py [--seconds 8] [--streams 256].

The stand-in is a process of its own that ticks every millisecond and gives each request tokens at a set rate. Told are
the gaps between its ticks, alone and while the front streams, tokenizes a prompt of 100,000 tokens again and again and
has a client that reads nothing; and the tokens a second that reach clients when the stand-in gives more than that.
"""

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from jaxllm.scheduler.request import RequestUpdate

TICK = 0.001  # seconds
MAX_MODEL_LEN = 1_000_000
LONG_PROMPT = 100_000  # tokens
TOKENS_PER_SECOND = 40.0  # of each stream
TEXT = "The old bridge over the river was built by people who came from the north, and nobody knows when that was. "


class TickingEngine:
    """Stands in for Engine: each step waits for the next tick, and some of the requests get their next token."""

    def __init__(self, token_ids: list[int], tokens_per_second: float):
        from jaxllm.engine.engine import StepTimes
        from jaxllm.engine.limits import EngineLimits
        from jaxllm.scheduler.batch import SchedulerStats

        self.limits = EngineLimits(vocab_size=1 << 20, max_model_len=MAX_MODEL_LEN)
        self.hanging = None
        self.has_work = True
        self.times = StepTimes()
        self.ticks: list[float] = []
        self._nothing = SchedulerStats(**dict.fromkeys(SchedulerStats.__dataclass_fields__, 0))
        self.scheduler = self
        self.pool_size = (0, 0)
        self.num_quiet_tokens = 0
        self._token_ids = token_ids
        self._rate = tokens_per_second  # for each request
        self._owed = 0.0
        self._next = self._last = time.perf_counter()
        self._turns: deque[list[Any]] = deque()  # name, tokens left, tokens given

    @property
    def stats(self) -> Any:
        return replace(self._nothing, running=len(self._turns))

    @property
    def rank_stats(self) -> list[Any]:
        return [self.stats]

    def add(self, request_id: str, prompt_ids: list[int], params: Any, *rest: Any) -> None:
        outputs = rest[-1]  # of a stand-in before this one
        num_given = len(outputs[request_id]) if outputs else 0
        self._turns.append([request_id, params.max_tokens - num_given, num_given])

    def abort(self, request_id: str) -> RequestUpdate | None:
        found = [turn for turn in self._turns if turn[0] == request_id]
        if not found:
            return None
        self._turns.remove(found[0])
        return RequestUpdate(request_id, finish_reason="abort")

    def close(self) -> None:
        pass

    def step(self) -> list[RequestUpdate]:
        now = time.perf_counter()
        if now < self._next:
            time.sleep(self._next - now)
            now = time.perf_counter()
        self._next = max(self._next + TICK, now)
        self.ticks.append(time.monotonic())
        self._owed = min(self._owed + self._rate * len(self._turns) * (now - self._last), len(self._turns))
        self._last = now
        num_given = int(self._owed)
        self._owed -= num_given
        return [self._give(self._turns.popleft()) for _ in range(num_given)]

    def _give(self, turn: list[Any]) -> RequestUpdate:
        name, left, given = turn
        turn[1:] = left - 1, given + 1
        if left > 1:
            self._turns.append(turn)
        token = self._token_ids[given % len(self._token_ids)]
        return RequestUpdate(name, (token,), None if left > 1 else "length", num_output_tokens=given + 1)


def run_engine() -> int:
    """Is the stand-in's process: what the server starts in the engine's place. Writes down its ticks at the end."""
    from jaxllm.api.start import Started
    from jaxllm.config.engine_args import EngineArgs
    from jaxllm.engine.model_source import find_model
    from jaxllm.server.child_process import Parent, as_fields
    from jaxllm.server.engine_process import run
    from jaxllm.text.gguf_tokenizer import tokenizer_from_gguf

    parent = Parent()
    checkpoint: Any = find_model(EngineArgs(**as_fields(parent.order["engine"]))).checkpoint
    tokenizer = tokenizer_from_gguf(checkpoint.tokenizer_fields())
    engine = TickingEngine(tokenizer.encode(TEXT), float(sys.argv[2]))
    built: Any = SimpleNamespace(
        engine=engine, processes=None, sampling_defaults={}, wait_until_compiled=lambda _: True, close=lambda: None
    )
    code = run(Started(built, tokenizer), parent)
    Path(sys.argv[3]).write_text(json.dumps(engine.ticks))
    return code


def run_server(port: int, tokens_per_second: float, ticks: Path, num_fronts: int) -> int:
    """Is the server's process: all as in `jaxllm serve`, but for the engine's command."""
    from jaxllm.config.engine_args import EngineArgs
    from jaxllm.config.server_args import ServerArgs
    from jaxllm.server import engine_supervisor, serve

    engine_supervisor.ENGINE_COMMAND = (__file__, "engine", str(tokens_per_second), str(ticks))
    args = ServerArgs(host="127.0.0.1", port=port, api_server_count=num_fronts, disable_uvicorn_access_log=True)
    return serve.serve(EngineArgs(disable_log_stats=True), args)


class Clients:
    """Streams of one process over plain sockets: reading costs as little as it can."""

    def __init__(self, port: int, count: int, max_tokens: int):
        self.num_bytes = 0
        self.num_tokens = 0
        self.tails: dict[socket.socket, bytes] = {}
        self.num_events = 0
        self._selector = selectors.DefaultSelector()
        for _ in range(count):
            connection = ask(port, {"prompt": "Once", "max_tokens": max_tokens})
            connection.setblocking(False)
            self.tails[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)

    def read(self, seconds: float) -> None:
        """Reads until that time is over, or all streams are."""
        end = time.monotonic() + seconds
        while self._selector.get_map() and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                connection = cast(socket.socket, key.fileobj)
                piece = connection.recv(1 << 16)
                self.num_events += piece.count(b"data: ")
                self.tails[connection] = (self.tails[connection] + piece)[-600:]
                if b"[DONE]" in self.tails[connection]:
                    self.num_tokens += int(self.tails[connection].rpartition(b'"completion_tokens":')[2].split(b",")[0])
                    self._selector.unregister(connection)
                    connection.close()

    def close(self) -> None:
        for connection in self.tails:
            connection.close()


def ask(port: int, body: dict[str, Any]) -> socket.socket:
    """Sends a request for a stream and reads nothing."""
    whole = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
    content = json.dumps(whole).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    connection.sendall(head % len(content) + content)
    return connection


class Server:
    """The server's process, and the ticks of its engine once it has ended."""

    def __init__(self, tokens_per_second: float, num_fronts: int = 1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._file = Path(f"/tmp/jaxllm-ticks-{os.getpid()}.json")
        command = [sys.executable, __file__, "server", str(self.port), str(tokens_per_second), str(self._file)]
        command.append(str(num_fronts))
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "Ctrl-C" in line:
                return
        raise RuntimeError("the server did not start")

    def end(self) -> list[float]:
        """Ends it and gives the times of the ticks."""
        self.process.terminate()
        self.process.wait(60)
        ticks = json.loads(self._file.read_text())
        self._file.unlink()
        return ticks


def gaps(ticks: list[float], start: float, end: float) -> list[float]:
    """Gives the gaps between the ticks of a span of time in milliseconds, the shortest first."""
    inside = [tick for tick in ticks if start <= tick <= end]
    return sorted((after - before) * 1e3 for before, after in pairwise(inside))


def percentile(ordered: list[float], percent: int) -> float:
    """Gives the value below which so many percent lie."""
    return ordered[len(ordered) * percent // 100]


def load(port: int, seconds: float, num_streams: int) -> tuple[tuple[float, float], int, int]:
    """Loads a server; gives when it did, and the events that streams brought and the long prompts meanwhile."""
    clients = Clients(port, num_streams, max_tokens=100_000)
    stuck = ask(port, {"prompt": "Once", "max_tokens": 900_000})
    is_over = threading.Event()
    num_long = 0

    def tokenize_long() -> None:
        nonlocal num_long
        while not is_over.is_set():
            with ask(port, {"prompt": TEXT * (LONG_PROMPT // 22), "max_tokens": 1}) as connection:
                while b"[DONE]" not in connection.recv(1 << 16):
                    pass
            num_long += 1

    clients.read(1.0)
    long = threading.Thread(target=tokenize_long)
    long.start()
    before, start = clients.num_events, time.monotonic()
    clients.read(seconds)
    end, events = time.monotonic(), clients.num_events - before
    is_over.set()
    long.join()
    stuck.close()
    clients.close()
    return (start, end), events, num_long


def give_way() -> None:
    """Lowers the priority of this thread and of those that it starts."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, 15)


def measure_ticks(seconds: float, num_streams: int) -> dict[str, float]:
    """Compares the ticks of a server without requests to those under load; times in milliseconds."""
    server = Server(TOKENS_PER_SECOND)
    try:
        time.sleep(1.0)
        idle = (time.monotonic(), time.monotonic() + seconds)
        time.sleep(seconds)
        # Clients are elsewhere as a rule: here they leave the cores to the server.
        with ThreadPoolExecutor(1, initializer=give_way) as elsewhere:
            loaded, num_events, num_long = elsewhere.submit(load, server.port, seconds, num_streams).result()
    finally:
        ticks = server.end()
    alone, under_load = gaps(ticks, *idle), gaps(ticks, *loaded)
    return {
        "alone p50": percentile(alone, 50),
        "alone p99": percentile(alone, 99),
        "loaded p50": percentile(under_load, 50),
        "loaded p99": percentile(under_load, 99),
        "loaded max": under_load[-1],
        "events/s": num_events / seconds,
        "long prompts": num_long,
    }


def measure_rate(seconds: float, num_streams: int, asked: float) -> dict[str, float]:
    """Gives the tokens a second that reach the clients when the stand-in gives so many."""
    server = Server(asked / num_streams)
    try:
        begin = time.monotonic()
        clients = Clients(server.port, num_streams, max_tokens=int(asked * seconds / num_streams))
        clients.read(seconds * 20)
        spent = time.monotonic() - begin
    finally:
        server.end()
    return {
        "tokens/s": clients.num_tokens / spent,
        "tokens": clients.num_tokens,
        "events/s": clients.num_events / spent,
        "seconds": spent,
    }


def main() -> int:
    """Prints both measurements as one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--asked", type=float, default=20_000, help="tokens a second that the stand-in gives to all")
    args = parser.parse_args()
    print(f"{args.streams} streams, {os.cpu_count()} cores, {args.seconds:g} s each, commands: {' '.join(sys.argv)}")
    for title, figures in (
        ("gaps between ticks, ms", measure_ticks(args.seconds, args.streams)),
        ("through the front", measure_rate(args.seconds, args.streams, args.asked)),
    ):
        print(title)
        for name, value in figures.items():
            print(f"  {name:14} {value:12.3f}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        sys.exit(run_engine())
    if sys.argv[1:2] == ["server"]:
        sys.exit(run_server(int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])))
    sys.exit(main())
