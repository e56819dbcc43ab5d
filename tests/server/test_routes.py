"""Routes beside those that generate, over the scripted engine: tokenizer, render, token ids, probes, admin."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.config.server_args import ServerArgs

HELLO = [{"role": "user", "content": "hello"}]


def letters_after(num_tokens: int, count: int) -> str:
    """What the scripted model answers to a prompt of so many tokens."""
    return "".join(chr(ord("a") + (num_tokens + i) % 26) for i in range(count))


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    message = response.json()["error"]["message"]
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def served(serve_app: Any, tokenizer: Any) -> Iterator[Any]:
    """A server with an admin key, which its client sends."""
    args = ServerArgs(
        admin_api_key=("root",),
        enable_tokenizer_info_endpoint=True,
        default_chat_template_kwargs={"suffix": "!"},
        trust_request_chat_template=True,
        enable_request_id_headers=True,
        enable_prompt_tokens_details=True,
    )
    with serve_app(args, tokenizer) as app:
        app.client.headers["Authorization"] = "Bearer root"
        yield app


def test_texts_and_chats_become_tokens_and_tokens_text(served: Any, tokenizer: Any):
    answer = served.client.post("/tokenize", json={"prompt": "hello", "return_token_strs": True}).json()
    assert answer == {
        "count": 5,
        "max_model_len": 128,
        "tokens": tokenizer.encode("hello"),
        "token_strs": list("hello"),
    }
    assert served.client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hello"}
    chat = served.client.post("/tokenize", json={"messages": HELLO}).json()
    assert (chat["tokens"], chat["token_strs"]) == (tokenizer.encode("hello!"), None)
    assert served.client.get("/tokenizer_info").json()["vocab_size"] == 256


@pytest.mark.parametrize(
    ("route", "body", "says"),
    [
        ("/tokenize", {}, "give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "give either prompt or messages"),
        ("/tokenize", {"prompt": 3}, "prompt: "),
        ("/tokenize", {"messages": [3]}, "messages: "),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools=[{}] is not supported yet"),
        ("/detokenize", {"tokens": ["a"]}, "tokens must be a list of token ids, got ['a']"),
        ("/detokenize", {"tokens": [-1]}, "tokens must be a list of token ids"),
        ("/inference/v1/generate", {"token_ids": "abc", "sampling_params": {}}, "token_ids must be a list"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"temp": 1}}, "has no field 'temp'"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"detokenize": False}}, "no field 'detok"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": "a"}}, "max_tokens must be"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 128}}, "maximum context"),
        ("/inference/v1/generate", {"token_ids": [256], "sampling_params": {}}, "outside the vocabulary"),
        ("/inference/v1/generate", {"token_ids": [1]}, "the field 'sampling_params' is missing"),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
        ("/v1/completions", {"prompt": "a", "stream_options": {}}, "stream_options needs stream=true"),
        ("/v1/completions", {"prompt": "a", "timeout": -1}, "timeout must be a number of seconds above 0"),
        ("/v1/completions", {"prompt": "a", "request_id": "a\nb"}, "request_id must have 1 to 256 printable"),
        ("/invocations", {"max_tokens": 3}, "must have messages or prompt"),
        ("/invocations", {"prompt": "a", "max_tokens": "b"}, "max_tokens: "),
        ("/log_level", {"level": "loud"}, "level='loud' is not known"),
        ("/start_profile", {}, "profiling needs a server with --profiler-config"),
        ("/abort_request", {}, "name a request in rid"),
        ("/pause?mode=never", {}, "mode: "),
    ],
)
def test_a_mistake_is_told_in_one_line(served: Any, route: str, body: Any, says: str):
    assert says in refusal(served.client.post(route, json=body), 400)


def test_what_is_rendered_generates_what_the_plain_routes_do(served: Any):
    body = {"messages": HELLO, "max_tokens": 7, "temperature": 0, "stop": ["zz"], "logit_bias": {"3": 1.5}}
    plain = served.post("chat/completions", {**body, "return_token_ids": True}).json()
    rendered = served.post("chat/completions/render", body).json()
    assert rendered["token_ids"] == plain["prompt_token_ids"]
    assert rendered["sampling_params"] == {
        "max_tokens": 7,
        "temperature": 0.0,
        "stop": ["zz"],
        "logit_bias": {"3": 1.5},
    }
    answer = served.client.post("/inference/v1/generate", json=rendered).json()
    assert answer["request_id"] == rendered["request_id"]
    assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert answer["usage"]["completion_tokens"] == 7
    prompts = {"prompt": ["hi", "hello"], "max_tokens": 3}
    each = served.post("completions/render", prompts).json()
    assert [len(one["token_ids"]) for one in each] == [2, 5]
    texts = [choice["text"] for choice in served.post("completions", prompts).json()["choices"]]
    for one, text in zip(each, texts, strict=True):
        ids = served.client.post("/inference/v1/generate", json=one).json()["choices"][0]["token_ids"]
        assert served.client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text


def test_token_ids_stream_with_log_probabilities_and_usage(served: Any):
    body = {
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 4, "logprobs": 1, "n": 2, "seed": 1},
        "request_id": "mine",
        "return_tokens_as_token_ids": True,
    }
    whole = served.client.post("/inference/v1/generate", json=body).json()
    assert [len(choice["logprobs"]["content"]) for choice in whole["choices"]] == [4, 4]
    assert whole["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with served.client.stream("POST", "/inference/v1/generate", json=stream) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    assert {event["request_id"] for event in events} == {"mine"}
    assert events[-1]["usage"]["completion_tokens"] == 8
    ids: list[list[int]] = [[], []]
    for event in events[:-1]:
        (choice,) = event["choices"]
        ids[choice["index"]] += choice["token_ids"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert ids == [choice["token_ids"] for choice in whole["choices"]]


def test_a_prompt_is_cut_at_its_front_where_that_is_asked_for(served: Any):
    body = {"prompt": "abcdef", "max_tokens": 2, "truncate_prompt_tokens": 4, "echo": True}
    answer = served.post("completions", body).json()
    assert (answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]) == ("cdef" + letters_after(4, 2), 4)
    body = {"prompt": "x" * 500, "max_tokens": 8, "truncate_prompt_tokens": -1}
    assert served.post("completions", body).json()["usage"]["prompt_tokens"] == 120


def test_the_template_and_its_variables_may_come_with_the_request(served: Any):
    body = {"messages": HELLO, "max_tokens": 1, "documents": [{"text": "doc"}]}
    body["chat_template"] = "{{ documents[0].text }}{{ suffix }}"
    assert served.post("chat/completions", body).json()["usage"]["prompt_tokens"] == 4
    body["chat_template_kwargs"] = {"suffix": ""}
    assert served.post("chat/completions", body).json()["usage"]["prompt_tokens"] == 3


def test_a_name_goes_through_to_answer_and_header_even_twice_at_once(served: Any):
    served.runner.step_seconds = 0.02
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "ab", "max_tokens": 10}
        answers.append(httpx.post(served.url + "/v1/completions", json=body, headers={"X-Request-Id": "trace-7"}))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    served.runner.step_seconds = 0.0
    assert [answer.headers["X-Request-Id"] for answer in answers] == ["trace-7"] * 2
    assert [answer.json()["id"] for answer in answers] == ["cmpl-trace-7"] * 2
    unnamed = served.post("completions", {"prompt": "ab", "max_tokens": 1})
    assert unnamed.json()["id"] == "cmpl-" + unnamed.headers["X-Request-Id"]
    named = served.post("chat/completions", {"messages": HELLO, "max_tokens": 1, "request_id": "x"})
    assert len(named.headers["X-Request-Id"]) == 32
    too_long = served.client.get("/health", headers={"X-Request-Id": "x" * 300})
    assert "at most 256 printable" in refusal(too_long, 400)


def test_a_paused_server_is_alive_but_not_ready(served: Any):
    assert served.client.get("/ready").status_code == 200
    assert served.client.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert served.client.get("/is_paused").json() == {"is_paused": True}
    assert "paused" in refusal(served.client.get("/ready"), 503)
    assert [served.client.get(path).status_code for path in ("/live", "/health", "/ping")] == [200] * 3
    waiting = served.client.post("/v1/completions", json={"prompt": "ab", "timeout": 0.2})
    assert "time was over" in refusal(waiting, 504)
    assert "paused already" in refusal(served.client.post("/pause?mode=wait"), 400)
    assert served.client.post("/resume").json() == {"status": "resumed"}
    for mode in ("in_place", "retract", "abort"):
        assert served.client.post("/pause_generation", json={"mode": mode}).status_code == 200
        assert served.client.post("/continue_generation").status_code == 200
    assert served.client.get("/ready").status_code == 200
    assert served.post("completions", {"prompt": "ab", "max_tokens": 1}).status_code == 200


def test_requests_are_aborted_by_name_and_their_load_is_told(served: Any):
    served.runner.step_seconds = 0.02
    answers: dict[str, httpx.Response] = {}

    def ask(name: str) -> None:
        body = {"prompt": ["ab", "abc"], "max_tokens": 100, "request_id": name}
        answers[name] = httpx.post(served.url + "/v1/completions", json=body, timeout=20.0)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    served.wait_for(lambda: served.client.get("/load").json()["num_running"] == 4)
    assert served.client.get("/load").json()["server_load"] == 4
    refused = served.client.post("/reset_prefix_cache")
    aborted = served.client.post("/abort_requests", json={"request_ids": ["cmpl-a"]}).json()
    rest = served.client.post("/abort_request", json={"abort_all": True}).json()
    for thread in threads:
        thread.join(20)
    served.runner.step_seconds = 0.0
    assert "requests hold blocks" in refusal(refused, 409)
    assert aborted["aborted"] == 2
    assert rest["aborted"] >= 2
    reasons = [choice["finish_reason"] for name in "ab" for choice in answers[name].json()["choices"]]
    assert reasons == ["abort"] * 4
    served.wait_for(served.is_empty)
    assert served.client.post("/reset_prefix_cache").json() == {"success": True}
    assert served.client.post("/flush_cache").status_code == 200
    assert served.client.get("/load").json()["server_load"] == 0


def test_the_log_level_and_the_weights_version_can_be_changed(served: Any):
    name = "jaxllm.tests.level"
    assert served.client.post("/log_level", json={"level": "DEBUG", "logger": name}).json() == {"level": "debug"}
    assert logging.getLogger(name).level == logging.DEBUG
    assert served.client.get("/log_level").json()["level"] in ("debug", "info", "warning")
    assert served.client.post("/update_weight_version", json={"new_version": "v2"}).json()["success"]
    assert served.client.get("/weight_info").json() == {"weight_version": "v2"}


def test_a_body_goes_to_the_route_that_it_fits(served: Any):
    chat = served.client.post("/invocations", json={"messages": HELLO, "max_tokens": 2}).json()
    assert chat["object"] == "chat.completion"
    text = served.client.post("/invocations", json={"prompt": "ab", "max_tokens": 2}).json()
    assert text["choices"][0]["text"] == letters_after(2, 2)


def test_routes_of_features_to_come_are_named(served: Any):
    assert "/v1/responses is not supported yet" in refusal(served.client.post("/v1/responses", json={}), 404)
    assert "there is no route /v2" in refusal(served.client.get("/v2"), 404)


def test_keys_open_what_they_are_for_and_nothing_else(serve_app: Any, tokenizer: Any):
    def bearer(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    args = ServerArgs(api_key=("one", "two"), admin_api_key=("root",))
    body = {"prompt": "ab", "max_tokens": 1}
    with serve_app(args, tokenizer) as app:
        for path in ("/health", "/live", "/ready", "/ping", "/metrics", "/version", "/load", "/openapi.json"):
            assert app.client.get(path).status_code == 200
        assert "needs an API key" in refusal(app.client.post("/v1/completions", json=body), 401)
        assert "needs an API key" in refusal(app.client.post("/tokenize", json=body), 401)
        assert "needs an API key" in refusal(app.client.get("/no/such/route"), 401)
        assert "key is wrong" in refusal(app.client.post("/v1/completions", json=body, headers=bearer("three")), 401)
        for key in ("one", "two", "root"):
            assert app.client.post("/v1/completions", json=body, headers=bearer(key)).status_code == 200
        assert "needs an admin key" in refusal(app.client.post("/pause"), 401)
        for path in ("/pause", "/pause/"):
            assert "needs an admin key" in refusal(app.client.post(path, headers=bearer("one")), 403)
        assert app.client.get("/server_info", headers=bearer("root")).json()["max_num_seqs"] == 8
        origin = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        assert app.client.options("/v1/completions", headers=origin).status_code == 200


def test_without_an_admin_key_the_admin_routes_are_closed(shared_app: Any):
    assert "needs a server with --admin-api-key" in refusal(shared_app.client.post("/pause"), 403)
    assert "needs a server with --trust-request-chat-template" in refusal(
        shared_app.post("chat/completions", {"messages": HELLO, "chat_template": "x"}), 400
    )
    assert "--enable-tokenizer-info-endpoint" in refusal(shared_app.client.get("/tokenizer_info"), 404)


def test_a_full_queue_turns_requests_away_until_there_is_room(serve_app: Any, tokenizer: Any):
    with serve_app(ServerArgs(max_queued_requests=2), tokenizer) as app:
        app.runner.step_seconds = 0.02
        body = {"prompt": [f"{i:02}" for i in range(10)], "max_tokens": 60, "stream": True}
        with app.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            refused = httpx.post(app.url + "/v1/completions", json={"prompt": "a"})
            assert "the queue is full: 2 requests wait, --max-queued-requests is 2" in refusal(refused, 429)
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["Retry-After"]) <= 60
            assert refusal(app.client.get("/ready"), 503)
            assert app.client.get("/health").status_code == 200
            for _ in lines:
                pass
        assert httpx.post(app.url + "/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_deadline_ends_a_request_with_what_it_has_or_an_error(serve_app: Any, tokenizer: Any):
    with serve_app(ServerArgs(request_timeout=0.4), tokenizer) as app:
        app.runner.step_seconds = 0.03
        (choice,) = app.post("completions", {"prompt": "abc", "max_tokens": 100}).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", "timeout")
        assert letters_after(3, 100).startswith(choice["text"])
        assert 3 < len(choice["text"]) < 20
        late = app.client.post("/v1/completions", json={"prompt": "abc"}, headers={"X-Request-Timeout": "0.001"})
        assert "time was over before its first token" in refusal(late, 504)
        events = app.events("chat/completions", {"messages": HELLO, "max_tokens": 100, "timeout": 0.2})
        assert events[-1]["choices"][0]["stop_reason"] == "timeout"
        app.wait_for(app.is_empty)


def test_a_crash_leaves_a_file_about_the_last_requests_without_their_text(
    serve_app: Any, tokenizer: Any, tmp_path: Path
):
    for keeps_text in (False, True):
        folder = tmp_path / str(keeps_text)
        args = ServerArgs(crash_dump_dir=str(folder), crash_dump_text=keeps_text)
        with serve_app(args, tokenizer) as app:
            app.post("completions", {"prompt": "secret", "max_tokens": 3, "temperature": 0.5})
            app.runner.failure = RuntimeError("device lost")
            assert app.post("completions", {"prompt": "secret two"}).status_code == 500
            assert app.post("completions", {"prompt": "secret two"}).status_code == 500
        (file,) = folder.iterdir()  # the second failure of the same minute writes none
        told = json.loads(file.read_text())
        assert "device lost" in told["cause"]
        first, second = told["requests"]
        assert (first["finish_reason"], first["num_prompt_tokens"], first["num_output_tokens"]) == ("length", 6, 3)
        assert first["sampling_params"] == {"max_tokens": 3, "temperature": 0.5}
        assert (second["finish_reason"], second["num_output_tokens"]) == ("error", 0)
        assert "secret" not in file.read_text()
        assert ("prompt_token_ids" in first, "output_token_ids" in first) == (keeps_text, keeps_text)


def test_requests_and_outputs_are_logged_where_that_is_asked_for(
    serve_app: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
):
    args = ServerArgs(enable_log_requests=True, enable_log_outputs=True, max_log_len=3)
    with caplog.at_level(logging.INFO), serve_app(args, tokenizer) as app:
        app.post("completions", {"prompt": "hello", "max_tokens": 5, "request_id": "seen"})
    assert "prompt 'hel', params {'max_tokens': 5}" in caplog.text
    assert f"ended: length after 5 tokens: '{letters_after(5, 3)}'" in caplog.text
    assert "cmpl-seen" in caplog.text


def test_flags_speak_for_requests_that_do_not(serve_app: Any, tokenizer: Any):
    args = ServerArgs(return_tokens_as_token_ids=True, enable_force_include_usage=True)
    with serve_app(args, tokenizer) as app:
        body = {"prompt": "hello", "max_tokens": 2, "logprobs": 0}
        tokens = app.post("completions", body).json()["choices"][0]["logprobs"]["tokens"]
        assert [token[:9] for token in tokens] == ["token_id:"] * 2
        own = app.post("completions", {**body, "return_tokens_as_token_ids": False}).json()
        assert own["choices"][0]["logprobs"]["tokens"] == list(letters_after(5, 2))
        assert app.events("completions", body)[-1]["usage"]["completion_tokens"] == 2
