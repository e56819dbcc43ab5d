"""Real engines that are killed under load, behind `jaxllm serve`: what clients get is what they get otherwise."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 40

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(golden: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A tiny model behind a server, and its address."""
    flags = ["--skip-tokenizer-init", "--num-gpu-blocks-override", "1200", "--max-num-seqs", "100", "--port", "0"]
    command = [sys.executable, str(ROOT / "scripts" / "serve.py"), str(golden / "llama"), "--host", "127.0.0.1"]
    cache = str(Path(tempfile.gettempdir()) / f"jaxllm-tests-{os.getuid()}")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    greeting = ""
    for line in process.stdout:
        greeting += line
        if "Ctrl-C" in line:
            break
    yield process, next(word for word in greeting.split() if word.startswith("http://"))
    process.kill()
    process.communicate()


def engine_of(server: subprocess.Popen[str]) -> psutil.Process:
    (engine,) = psutil.Process(server.pid).children()
    return engine


def follow(url: str, index: int, begun: set[int]) -> tuple[list[int], int, str | None]:
    """Follows a stream, greedy or sampled: its tokens, how many usage told, how it ended."""
    how: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
    if index % 4 == 0:
        how |= {"presence_penalty": 0.5, "logprobs": 1}
    body = {"prompt": [3 + index, 7, 9], "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **how}
    body |= {"return_token_ids": True, "stream_options": {"include_usage": True}}
    tokens, told, reason = [], 0, None
    with httpx.Client(timeout=120.0) as client, client.stream("POST", f"{url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            told = (event.get("usage") or {}).get("completion_tokens", told)
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
                reason = choice["finish_reason"] or reason
                begun.add(index)
    return tokens, told, reason


def test_100_streams_get_the_same_tokens_when_the_engine_is_killed_under_them(server: Any):
    process, url = server
    undisturbed = set()
    with ThreadPoolExecutor(100) as pool:
        expected = list(pool.map(lambda index: follow(url, index, undisturbed), range(100)))
        begun: set[int] = set()
        streams = [pool.submit(follow, url, index, begun) for index in range(100)]
        deadline = time.monotonic() + 60
        while len(begun) < 100:
            assert time.monotonic() < deadline, "the streams did not begin"
            time.sleep(0.01)
        engine = engine_of(process)
        engine.kill()
        engine.wait(10)
        num_ended = sum(stream.done() for stream in streams)
        found = [stream.result(120) for stream in streams]
    assert num_ended < 100
    assert [(told, reason) for _, told, reason in expected] == [(NUM_TOKENS, "length")] * 100
    assert [len(tokens) for tokens, _, _ in found] == [NUM_TOKENS] * 100
    assert found == expected


def test_a_server_that_is_killed_leaves_no_engine_behind(server: Any):
    process, _ = server
    engine = engine_of(process)
    process.send_signal(signal.SIGKILL)
    engine.wait(10)
