"""`jaxllm bench serve` against a server that answers as it is told to, over a real socket."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxllm.bench.serve_args import ServeBenchArgs
from jaxllm.bench.serve_client import Record
from jaxllm.bench.serve_figures import draw_figures
from jaxllm.bench.serve_load import Requests, arrival_times
from jaxllm.bench.serve_search import find_max_rate
from jaxllm.bench.workloads import workload
from jaxllm.cli import main
from jaxllm.config.errors import InputError

VOCAB = 5000


class StubServer:
    """Speaks as much of OpenAI's API as the client asks for; one token each `pace` seconds and request."""

    def __init__(self) -> None:
        self.pace = 0.0
        self.breaks = ""  # how the next answers go wrong
        self.bodies: list[dict[str, Any]] = []
        self.most_under_way = self._under_way = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._talk, "127.0.0.1", 0), self._loop
        ).result(10)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), b":0"
                )
                body = await reader.readexactly(int(length.split(b":")[1]))
                if head.startswith(b"GET"):
                    self._answer(writer, 200, {"data": [{"id": "stub"}]})
                    continue
                self._under_way += 1
                self.most_under_way = max(self.most_under_way, self._under_way)
                await self._complete(writer, json.loads(body))
                self._under_way -= 1
        except asyncio.IncompleteReadError:
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, status: int, said: Any) -> None:
        content = json.dumps(said).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(content), content))

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.bodies.append(body)
        prompt = body.get("prompt") or body["messages"][0]["content"].split()
        if self.breaks == "busy":
            self._answer(writer, 429, {"error": {"message": "too many\nrequests"}})
            return
        if "prompt" in body and max(prompt) >= VOCAB:
            self._answer(writer, 400, {"error": {"message": f"beyond {VOCAB}"}})
            return
        writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index in range(body["max_tokens"]):
            await asyncio.sleep(self.pace)
            delta = {"delta": {"content": "a"}} if "messages" in body else {"text": "a"}
            self._event(writer, {"choices": [{"index": 0, **delta}]})
            if self.breaks == "error" and index:
                self._event(writer, {"error": {"message": "the step failed"}})
            if self.breaks == "cut" and index:
                writer.close()
                return
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        self._event(writer, {"choices": [], "usage": usage})
        self._event(writer, None)
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, data: Any) -> None:
        text = b"data: %s\n\n" % (b"[DONE]" if data is None else json.dumps(data).encode())
        half = len(text) // 2  # events do not come whole
        for piece in (text[:half], text[half:]):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))


@pytest.fixture
def stub() -> Iterator[StubServer]:
    server = StubServer()
    yield server
    server.close()


def bench(capsys: pytest.CaptureFixture[str], port: int, *flags: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", "--port", str(port), *flags])
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out, err


RANDOM = ("--input-len", "20", "--output-len", "5")


def test_a_run_tells_tokens_times_and_goodput_as_the_server_gave_them(stub, capsys, tmp_path: Path):
    stub.pace = 0.02
    files = ("--output-json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.html"))
    flags = ("--num-prompts", "8", "--max-concurrency", "3", "--goodput", "tpot:1000", "ttft:0.001", "--save-detailed")
    code, out, err = bench(capsys, stub.port, *RANDOM, *flags, *files)
    assert code == 0, err
    said = json.loads((tmp_path / "run.json").read_text())
    assert (said["completed"], said["failed"]) == (8, 0)
    assert (said["total_input_tokens"], said["total_output_tokens"]) == (8 * 20, 8 * 5)
    assert (said["request_goodput"], said["model_id"]) == (0, "stub")
    assert 20 <= said["median_ttft_ms"] < 2000
    assert 20 <= said["mean_tpot_ms"] < 2000
    assert said["mean_tpot_ms"] == pytest.approx(said["mean_itl_ms"])
    assert said["mean_e2el_ms"] == pytest.approx(said["mean_ttft_ms"] + 4 * said["mean_tpot_ms"])
    assert said["output_throughput"] == pytest.approx(40 / said["duration"])
    assert [len(gaps) for gaps in said["itls"]] == [4] * 8
    assert stub.most_under_way == said["max_concurrent_requests"] == 3
    assert "folded into a vocabulary of 4,096" in err
    assert len(stub.bodies) == 8 + 6  # 99,999 and powers of 2 down to 4,096 were tried
    assert "goodput           0.00 requests/s, 0.0% of all" in out
    page = (tmp_path / "run.html").read_text()
    ElementTree.fromstring(page[page.index("<svg") : page.rindex("</svg>") + 6])
    assert page.count("<circle") == 8


def test_words_are_sent_to_the_chat_route_and_other_fields_with_them(stub, capsys):
    flags = ("--backend", "openai-chat", "--num-prompts", "2", "--extra-body", '{"top_k": 3}', "--no-ignore-eos")
    code, out, _ = bench(capsys, stub.port, *RANDOM, *flags, "--num-warmups", "1")
    assert code == 0
    assert "40 of prompts, 10 generated" in out
    body = stub.bodies[-1]
    assert (body["top_k"], body["temperature"], "ignore_eos" in body) == (3, 0.0, False)
    assert len(stub.bodies) == 3
    assert len({body["messages"][0]["content"] for body in stub.bodies}) == 3


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        ("error", "2 x the answer broke off: the step failed"),
        ("cut", "2 x the connection ended before the answer was whole"),
        ("busy", "2 x HTTP 429: too many requests"),
    ],
)
def test_requests_that_fail_are_counted_with_their_cause_and_their_tokens_are_not(stub, capsys, breaks, said):
    stub.breaks = breaks
    code, out, _ = bench(capsys, stub.port, *RANDOM, "--num-prompts", "2", "--vocab-size", str(VOCAB))
    assert code == 1
    assert "0 whole, 2 failed" in out
    assert "0 of prompts, 0 generated" in out
    assert said in out


def test_a_trace_is_sent_with_its_lengths_at_its_times(stub, capsys, tmp_path: Path):
    lines = [{"timestamp": at, "input_length": 3 + at, "output_length": 2} for at in (1150, 1000)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ("--trace", str(tmp_path / "trace.jsonl"), "--vocab-size", "500")
    began = time.perf_counter()
    code, _, _ = bench(capsys, stub.port, *flags)
    assert code == 0
    assert time.perf_counter() - began > 0.15
    assert [len(body["prompt"]) for body in stub.bodies] == [1003, 1153]


def test_the_rate_search_ends_between_what_holds_and_what_does_not(stub, capsys, tmp_path: Path):
    def figures(rate: float, limit: float) -> Any:
        records = [Record(sent=i / rate, planned=i / rate, num_output_tokens=2) for i in range(50)]
        for record in records:
            record.times = [record.sent + (0.1 if rate <= limit else 9.0), record.sent + 10.0]
        return draw_figures(records, {"ttft": 1.0}, rate)

    async def measure(rate: float, repeat: int) -> Any:
        return figures(rate, 2.9)

    found = asyncio.run(find_max_rate(measure, 0.5, 0.9, 0.05))
    assert found.rate is not None
    assert 2.9 / 1.05 <= found.rate <= 2.9
    assert [trial.rate for trial in found.trials[:4]] == [0.5, 1.0, 2.0, 4.0]
    down = asyncio.run(find_max_rate(measure, 20.0, 0.9, 0.05))
    assert down.rate == pytest.approx(2.9, rel=0.05)

    async def hopeless(rate: float, repeat: int) -> Any:
        return figures(rate, 0.0)

    assert asyncio.run(find_max_rate(hopeless, 1.0, 0.9, 0.05)).rate is None
    # Through the command: the stub is as fast as all of them need it to be.
    flags = ("--num-prompts", "4", "--find-max-rate", "--goodput", "ttft:5000", "--request-rate", "40")
    code, out, _ = bench(capsys, stub.port, *RANDOM, *flags, "--plot", str(tmp_path / "search.svg"))
    assert code == 0
    assert "even when all 4 come at once" in out
    ElementTree.parse(tmp_path / "search.svg")
    assert len({tuple(body["prompt"]) for body in stub.bodies}) == len(stub.bodies)  # no trial finds cached prompts


def test_arrivals_have_the_rate_as_a_whole_and_the_bursts_that_are_asked_for():
    for burstiness in (0.2, 1.0, 25.0):
        times = np.array(arrival_times(4001, 20.0, burstiness))
        gaps = np.diff(times)
        assert (times[0], times[-1]) == (0.0, pytest.approx(200.0))
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert arrival_times(3, float("inf")) == [0.0, 0.0, 0.0]
    assert arrival_times(1, 5.0) == [0.0]


def test_requests_are_those_of_the_comparison_and_random_ones_share_the_prefix_that_is_asked_for():
    assert Requests(ServeBenchArgs(workload="W2", num_prompts=5)).draw(0) == workload("W2", 0, 5)
    args = ServeBenchArgs(num_prompts=3, random_input_len=8, random_output_len=2, random_prefix_len=6)
    prompts = [request.prompt for request in Requests(args).draw(0)]
    assert {len(prompt) for prompt in prompts} == {14}
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--backend", "tgi"], "--backend='tgi' is not known"),
        (["--base-url", "localhost:8000"], "--base-url='localhost:8000' is no address"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--goodput", "ttft=200"], "goodput: 'ttft=200' is not NAME:MILLISECONDS"),
        (["--goodput", "itl:5"], "'itl' is not known; there are ttft, tpot, e2el"),
        (["--find-max-rate"], "--find-max-rate needs targets"),
        (["--workload", "W9"], "--workload='W9' is not known"),
        (["--workload", "W1", "--input-len", "5"], "--input-len=5 is given beside a workload"),
        (["--trace", "none.jsonl"], "cannot be read: No such file"),
        (["--plot", "run.pdf"], "neither .svg nor .html nor .png"),
        (["--output-json", "/no/run.json"], "there is no folder /no"),
        (["--header", "Auth"], "header: 'Auth' is not KEY=VALUE"),
        (["--metric-percentiles", "101"], "are not numbers from 0 to 100"),
        ([], "cannot be reached (ConnectError"),
    ],
)
def test_a_mistake_is_one_line(capsys, flags, said):
    code, out, err = bench(capsys, 9, *flags)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


def test_a_trace_whose_lines_tell_times_only_sometimes_is_refused(tmp_path: Path):
    (tmp_path / "t").write_text(
        '{"input_length": 1, "output_length": 1}\n{"timestamp": 1, "input_length": 1, "output_length": 1}'
    )
    with pytest.raises(InputError, match="every line must have a timestamp, or none"):
        Requests(ServeBenchArgs(trace=str(tmp_path / "t")))
