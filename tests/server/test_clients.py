"""What lm-eval, aiperf and curl send, as they sent it, to a server with HTTPS, keys and JSON log lines; its end too."""

import json
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.slow
QUESTION = "The capital of France is"


@pytest.fixture(scope="module")
def server(
    serve_process: Any, certificate: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, httpx.Client, Path]]:
    """The process, a client that trusts it and has a key, and where it writes traces."""
    cert, key = certificate
    traces = tmp_path_factory.mktemp("traces")
    flags = (
        *("--ssl-certfile", cert, "--ssl-keyfile", key, "--api-key", "sesame", "other", "--admin-api-key", "root"),
        *("--log-format", "json", "--enable-request-id-headers", "--enable-tokenizer-info-endpoint"),
        *("--profiler-config", json.dumps({"directory": str(traces)}), "--model-impl", "auto"),
    )
    process = serve_process(*flags)
    try:
        process.wait_until_ready()
        headers = {"Authorization": "Bearer sesame"}
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=process.url, headers=headers, verify=trusting, timeout=100.0) as client:
            yield process, client, traces
    finally:
        process.close()


def test_lm_eval_has_its_log_likelihoods(server: tuple[Any, httpx.Client, Path]):
    _, client, _ = server

    def encode(text: str) -> list[int]:
        return client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]

    info = client.get("/tokenizer_info").json()
    assert (info["eos_token"], len(encode(info["eos_token"]))) == ("<|im_end|>", 1)
    context = encode(QUESTION)
    prompts = [context + encode(answer) for answer in (" Paris", " Rome", " banana")]
    settings = {"model": "smollm2", "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = client.post("/v1/completions", json={**settings, "prompt": prompts}).json()
    likelihoods, greedy = [], []
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(prompt) + 1
        own, best = told["token_logprobs"][len(context) : -1], told["top_logprobs"][len(context) : -1]
        likelihoods.append(sum(own))
        greedy.append(all(mine == max(top.values()) for mine, top in zip(own, best, strict=True)))
    assert likelihoods[0] > likelihoods[1] > likelihoods[2]
    assert greedy == [True, False, False]
    body = {"model": "smollm2", "prompt": [context], "max_tokens": 4, "temperature": 0, "stop": ["\n"], "seed": 1234}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith(" Paris")
    chat = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION, "type": "text"}], "max_tokens": 4}
    chat |= {"temperature": 0, "stop": ["\n"], "seed": 1234}
    assert client.post("/v1/chat/completions", json=chat).json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_aiperf_has_its_stream_with_usage_under_the_name_that_it_gave(server: tuple[Any, httpx.Client, Path]):
    _, client, _ = server
    body = {"messages": [{"role": "user", "content": QUESTION}], "model": "smollm2", "stream": True}
    body |= {"max_completion_tokens": 4, "stream_options": {"include_usage": True}}
    headers = {"X-Request-ID": "2dd48feb-dd98", "X-Correlation-ID": "14785e3f", "Accept": "text/event-stream"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert response.headers["X-Request-Id"] == "2dd48feb-dd98"
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert {event["id"] for event in events} == {"chatcmpl-2dd48feb-dd98"}
    assert events[-1]["usage"]["completion_tokens"] == 4


def test_openais_client_and_curl_need_their_key(server: tuple[Any, httpx.Client, Path], certificate: tuple[str, str]):
    process, _, _ = server
    trusting: Any = httpx.Client(verify=ssl.create_default_context(cafile=certificate[0]))
    settings: Any = {"model": "smollm2", "prompt": QUESTION, "max_tokens": 1, "temperature": 0}
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="other", http_client=trusting, max_retries=0) as known:
        assert known.completions.create(**settings).choices[0].text == " Paris"
        with pytest.raises(openai.AuthenticationError, match="the API key is wrong"):
            known.with_options(api_key="guess").completions.create(**settings)
    if shutil.which("curl") is not None:
        command = ["curl", "-s", "--cacert", certificate[0], "-H", "Authorization: Bearer sesame"]
        done = subprocess.run([*command, f"{process.url}/v1/models"], capture_output=True, timeout=60)
        assert json.loads(done.stdout)["data"][0]["id"] == "smollm2"


def test_a_profile_is_written_where_the_flag_says(server: tuple[Any, httpx.Client, Path]):
    _, client, traces = server
    assert client.post("/start_profile").status_code == 403
    headers = {"Authorization": "Bearer root"}
    assert client.post("/start_profile", headers=headers).json()["directory"] == str(traces)
    body = {"prompt": QUESTION, "max_tokens": 2, "temperature": 0}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert client.post("/stop_profile", headers=headers).status_code == 200
    assert any(path.is_file() and path.stat().st_size for path in traces.rglob("*"))


def test_at_the_end_every_line_of_the_log_was_json_and_no_key_was_in_it(server: tuple[Any, httpx.Client, Path]):
    process, _, _ = server  # its client keeps a connection open, of which nobody says goodbye
    start = time.monotonic()
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert time.monotonic() - start < 20
    first, *lines = process.read_log().splitlines()
    assert first.startswith("model_impl has no effect")  # told while the flags are read
    told = [json.loads(line) for line in lines]
    assert any("GET /v1/models HTTP/1.1" in each["message"] for each in told)
    assert not any(key in process.read_log() for key in ("sesame", '"root"', "guess"))
