"""SmolLM2 behind scripts/serve.py, asked as its users ask it: with OpenAI's own client."""

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
NOUNS = [
    *("cat", "dog", "river", "mountain", "king", "queen", "robot", "garden"),
    *("ship", "teacher", "doctor", "forest", "city", "moon", "sun", "book"),
]
PROMPTS = [f"{start} {noun}" for start in ("Once upon a time, a", "The most important thing about a") for noun in NOUNS]


@pytest.fixture(scope="module")
def client(smollm2: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:
        yield client


def test_a_chat_knows_the_capital_of_france(client: openai.OpenAI):
    answer = client.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0, max_tokens=24)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_same_text_with_the_same_usage(client: openai.OpenAI):
    settings: Any = {"model": "smollm2", "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**settings)
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(piece or "" for piece in pieces) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_a_completion_continues_text_and_stops_where_it_is_told(client: openai.OpenAI):
    settings: Any = {"model": "smollm2", "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 24}
    answer = client.completions.create(**settings)
    assert answer.choices[0].text.startswith(" 5, 6, 7")
    stopped = client.completions.create(**settings, stop=" 7")
    assert stopped.choices[0].text == " 5, 6,"
    assert stopped.choices[0].finish_reason == "stop"


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI):
    texts = [
        client.completions.create(model="smollm2", prompt="A story:", max_tokens=16, seed=seed).choices[0].text
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_samples_and_log_probabilities_reach_openais_client(client: openai.OpenAI):
    chat = client.chat.completions.create(
        model="smollm2", messages=CAPITAL, n=2, seed=1, temperature=0.01, max_tokens=4, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in chat.choices] == [0, 1]
    for choice in chat.choices:
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert "".join(entry.token for entry in entries) == choice.message.content == "The capital of France"
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in entries)
    scored = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=0, echo=True, logprobs=0
    )
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == scored.choices[0].text == "The capital of France is"
    assert (logprobs.token_logprobs or [0])[0] is None


def test_errors_are_those_that_openais_client_knows(client: openai.OpenAI, smollm2: Any):
    with pytest.raises(openai.NotFoundError, match="'gpt-7' does not exist"):
        client.chat.completions.create(model="gpt-7", messages=CAPITAL)
    with pytest.raises(
        openai.BadRequestError, match=r"maximum context length is 1024 tokens.*5 in the prompt"
    ) as raised:
        client.completions.create(model="smollm2", prompt="The capital of France is", max_tokens=1024)
    assert raised.value.code == "context_length_exceeded"
    tool: Any = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(openai.BadRequestError, match=r"tools=.* is not supported yet"):
        client.chat.completions.create(model="smollm2", messages=CAPITAL, tools=[tool])
    with pytest.raises(openai.BadRequestError, match="max_tokens: "):
        client.chat.completions.create(model="smollm2", messages=CAPITAL, max_tokens="many")  # pyright: ignore
    broken = httpx.post(f"{smollm2.url}/v1/completions", content="{", headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


def test_the_greeting_names_the_address_and_a_request_to_paste(smollm2: Any):
    assert f"jaxllm serves smollm2 at {smollm2.url}" in smollm2.greeting
    assert f"curl {smollm2.url}/v1/chat/completions" in smollm2.greeting
    assert "full-length requests" in smollm2.read_log()


def sampling_of(index: int) -> dict[str, Any]:
    """Half of the requests are greedy, half are sampled with a seed of their own."""
    return {"temperature": 0} if index % 2 else {"temperature": 0.8, "seed": index}


def test_32_streams_at_once_give_what_each_gives_alone(client: openai.OpenAI, smollm2: Any):
    def complete(index: int, stream: bool) -> str:
        settings: Any = {"model": "smollm2", "prompt": PROMPTS[index], "max_tokens": 5, **sampling_of(index)}
        if not stream:
            return client.completions.create(**settings).choices[0].text
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**settings, stream=True))

    alone = [complete(index, stream=False) for index in range(32)]
    before = smollm2.metrics()
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda index: complete(index, stream=True), range(32)))
    assert together == alone
    after = smollm2.metrics()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 32 * 5
    assert after["request_success_total[length]"] - before["request_success_total[length]"] == 32


def test_10_of_32_clients_that_leave_free_their_blocks_and_disturb_nobody(client: openai.OpenAI, smollm2: Any):
    before = smollm2.metrics()
    leaving = set(random.Random(0).sample(range(32), 10))
    all_run = threading.Barrier(32, timeout=100)

    def follow(index: int) -> str | None:
        settings: Any = {"model": "smollm2", "prompt": PROMPTS[index], "temperature": 0, "max_tokens": 12}
        if index in leaving:
            settings |= {"max_tokens": 900, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(**settings, stream=True)
        first = next(stream)
        all_run.wait()
        if index in leaving:
            stream.close()
            return None
        list(stream)
        return first.choices[0].text

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(follow, range(32)))
    assert sum(text is None for text in texts) == 10
    smollm2.wait_until(lambda metrics: metrics["num_requests_running"] == metrics["kv_cache_usage_perc"] == 0)
    after = smollm2.metrics()
    assert after["request_success_total[abort]"] - before["request_success_total[abort]"] == 10
    assert after["num_requests_waiting"] == 0


def load(url: str, max_tokens: int) -> tuple[list[threading.Thread], list[str | None]]:
    """Starts 8 streams and waits until each has a token; gives their threads and how they will have ended."""
    reasons: list[str | None] = [None] * 8
    begun = threading.Barrier(9, timeout=100)

    def follow(index: int) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=100.0, max_retries=0) as client:
            stream = client.completions.create(
                model="smollm2",
                prompt=PROMPTS[index],
                max_tokens=max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(stream)
            begun.wait()
            for chunk in stream:
                reasons[index] = chunk.choices[0].finish_reason

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    begun.wait()
    return threads, reasons


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load_lets_running_requests_end(start_smollm2: Callable[..., Any], number: signal.Signals):
    server = start_smollm2("--shutdown-timeout", "60")
    threads, reasons = load(server.url, max_tokens=40)
    server.signal(number)
    assert server.wait() == 0
    for thread in threads:
        thread.join(10)
    assert reasons == ["length"] * 8
    assert "Traceback" not in server.read_log()


@pytest.mark.slow
def test_a_drain_time_of_0_aborts_at_once(start_smollm2: Callable[..., Any]):
    server = start_smollm2("--shutdown-timeout", "0")
    threads, reasons = load(server.url, max_tokens=900)
    start = time.monotonic()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert time.monotonic() - start < 20
    for thread in threads:
        thread.join(10)
    assert reasons == ["abort"] * 8
    assert "Traceback" not in server.read_log()


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait(start_smollm2: Callable[..., Any]):
    server = start_smollm2("--shutdown-timeout", "500")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10) as connection:
        body = b'{"prompt": "A", "max_tokens": 1000, "ignore_eos": true, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(4096)
        server.signal(signal.SIGINT)
        time.sleep(1.0)
        assert server.process.poll() is None
        server.signal(signal.SIGINT)
        assert server.wait(10.0) == 130
