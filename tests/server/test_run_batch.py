"""A file of requests through the server's routes, on the scripted engine; bad lines among good ones."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.cli import main
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.app import build_app
from jaxllm.server.run_batch import run_batch


def line(custom_id: Any, body: Any, url: str = "/v1/completions", **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more})


def answers_of(app: Any, lines: list[str | bytes], folder: Path, under_way: int = 3) -> tuple[list[Any], int, int]:
    """What run_batch writes for these lines, and what it counts."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(b"\n".join(each if isinstance(each, bytes) else each.encode() for each in lines))

    async def run() -> tuple[int, int]:
        transport = httpx.ASGITransport(app=build_app(app.llm, "alphabet", ServerArgs()))
        async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
            return await run_batch(client, source, target, under_way)

    answered, failed = asyncio.run(run())
    return [json.loads(each) for each in target.read_text().splitlines()], answered, failed


def test_answers_stand_in_the_order_of_the_requests_and_are_the_routes_own(shared_app: Any, tmp_path: Path):
    shared_app.runner.step_seconds = 0.001
    lengths = [60, 2, 30, 1, 9, 4, 40, 3]
    lines: list[str | bytes] = [line(f"c{i}", {"prompt": "ab", "max_tokens": n}) for i, n in enumerate(lengths)]
    chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5, "n": 2}
    entries, answered, failed = answers_of(
        shared_app, [*lines, "", line("chat", chat, "/v1/chat/completions")], tmp_path
    )
    assert (answered, failed) == (9, 0)
    assert [entry["custom_id"] for entry in entries] == [*(f"c{i}" for i in range(8)), "chat"]
    assert all(entry["error"] is None and entry["response"]["status_code"] == 200 for entry in entries)
    bodies = [entry["response"]["body"] for entry in entries]
    assert [body["usage"]["completion_tokens"] for body in bodies] == [*lengths, 10]
    assert bodies[0]["choices"][0]["text"].startswith("cdefgh")
    assert [choice["message"]["content"] for choice in bodies[-1]["choices"]] == ["defgh"] * 2
    assert len({entry["id"] for entry in entries}) == 9
    over_http = shared_app.post("completions", {"prompt": "ab", "max_tokens": 9}).json()
    assert bodies[4]["choices"] == over_http["choices"]
    assert bodies[4].keys() == over_http.keys()


def test_a_bad_line_has_its_own_error_of_one_line_and_disturbs_no_other(shared_app: Any, tmp_path: Path):
    good = {"prompt": "ab", "max_tokens": 2}
    wrong: dict[str, tuple[str | bytes, str | None]] = {
        "line 1: it is not valid JSON": ("{", None),
        "line 2: it is not valid JSON: 'utf-8' codec": (b'{"custom_id": "\xff"}', None),
        "line 3: it must be a JSON object with custom_id": ("[1]", None),
        "line 4: custom_id must be a text": (line(7, good), None),
        "line 5: method must be 'POST', got 'GET'": (line("e", good, method="GET"), "e"),
        "line 6: url must be /v1/chat/completions or /v1/completions": (line("f", good, "/v1/models"), "f"),
        "line 7: body must be a JSON object, got None": (line("g", None), "g"),
        "line 8: stream must be left out": (line("h", {**good, "stream": True}), "h"),
        "line 9: custom_id 'h' is that of line 8 too": (line("h", good), "h"),
        "This model's maximum context length is 128": (line("j", {"prompt": "a" * 200}), "j"),
        "The model 'gpt-7' does not exist": (line("k", {**good, "model": "gpt-7"}), "k"),
        "the field 'prompt' is missing": (line("l", {}), "l"),
        "tools=": (line("m", {"messages": [], "tools": [{"type": "function"}]}, "/v1/chat/completions"), "m"),
    }
    lines = [text for text, _ in wrong.values()]
    entries, answered, failed = answers_of(shared_app, [*lines, line("z", good)], tmp_path)
    assert (answered, failed) == (1, len(wrong))
    for entry, (message, (_, custom_id)) in zip(entries[:-1], wrong.items(), strict=True):
        assert entry["error"]["message"].startswith(message)
        assert "\n" not in entry["error"]["message"]
        assert entry["custom_id"] == custom_id
        if message.startswith("line"):
            assert (entry["response"], entry["error"]["code"]) == (None, "invalid_request")
        else:
            assert entry["response"]["status_code"] in (400, 404)
            assert entry["response"]["body"]["error"]["message"] == entry["error"]["message"]
    assert entries[9]["error"]["code"] == "context_length_exceeded"
    assert entries[-1]["response"]["body"]["choices"][0]["text"] == "cd"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-o", "out.jsonl"], "--input-file is missing: name it with -i FILE"),
        (["-i", "in.jsonl"], "--output-file is missing: name it with -o FILE"),
        (["-i", "none.jsonl", "-o", "out.jsonl"], "--input-file='none.jsonl' cannot be read"),
        (["-i", "in.jsonl", "-o", "no/out.jsonl"], "there is no folder no"),
        (["-i", "in.jsonl", "-o", "./in.jsonl"], "is the input file too"),
        (["-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "0"], "--max-num-seqs"),
    ],
)
def test_a_mistake_is_one_line(capsys: Any, monkeypatch: Any, tmp_path: Path, flags: list[str], said: str):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["run-batch", *flags])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert said in err
