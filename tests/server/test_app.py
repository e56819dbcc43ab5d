import asyncio
import logging
import re
import threading
from typing import Any

import httpx
import pytest

from jaxllm import __version__
from jaxllm.config.server_args import ServerArgs

MAX_MODEL_LEN = 128
HELLO = [{"role": "user", "content": "hello"}]


def letters_after(num_tokens: int, count: int) -> str:
    """What the scripted model answers to a prompt of so many tokens."""
    return "".join(chr(ord("a") + (num_tokens + i) % 26) for i in range(count))


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert "\n" not in body["error"]["message"]
    return body["error"]


def test_a_chat_is_answered_in_openais_shape(shared_app: Any):
    answer = shared_app.post("chat/completions", {"model": "alphabet", "messages": HELLO, "max_tokens": 4}).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "alphabet")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": letters_after(5, 4)}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


def test_a_streamed_chat_says_the_role_first_and_the_same_text(shared_app: Any):
    events = shared_app.events("chat/completions", {"messages": HELLO, "max_tokens": 6})
    choices = [event["choices"][0] for event in events]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"]["content"] for choice in choices) == letters_after(5, 6)
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert all("usage" not in event for event in events)


def test_a_stream_ends_with_usage_where_the_client_wants_it(shared_app: Any):
    for route, prompt in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "hello"})):
        events = shared_app.events(route, {**prompt, "max_tokens": 3, "stream_options": {"include_usage": True}})
        assert [event.get("usage") for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def test_each_chunk_tells_the_usage_so_far_where_the_client_wants_it(shared_app: Any):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = shared_app.events("completions", {"prompt": "hello", "max_tokens": 3, "stream_options": options})
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("hello", [5]), (["hi", "hello"], [2, 5]), ([1, 2, 3], [3]), ([[1, 2, 3], [4], [5, 6]], [3, 1, 2])],
)
def test_a_completion_answers_each_of_its_prompts_at_its_index(shared_app: Any, prompt: Any, lengths: list[int]):
    body = {"prompt": prompt, "max_tokens": 7}
    answer = shared_app.post("completions", body).json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(lengths)))
    texts = [letters_after(length, 7) for length in lengths]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["completion_tokens"] == 7 * len(lengths)
    streamed = [""] * len(lengths)
    for event in shared_app.events("completions", body):
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_token_ids_are_given_where_the_client_wants_them(shared_app: Any):
    body = {"prompt": [7, 8, 9], "max_tokens": 4, "return_token_ids": True}
    (choice,) = shared_app.post("completions", body).json()["choices"]
    assert choice["prompt_token_ids"] == [7, 8, 9]
    assert len(choice["token_ids"]) == 4
    streamed = [event["choices"][0] for event in shared_app.events("completions", body)]
    assert [token for piece in streamed for token in piece["token_ids"]] == choice["token_ids"]
    assert [piece.get("prompt_token_ids") for piece in streamed] == [[7, 8, 9], None, None, None]
    chat = shared_app.post("chat/completions", {"messages": HELLO, "max_tokens": 4, "return_token_ids": True}).json()
    assert (len(chat["prompt_token_ids"]), len(chat["choices"][0]["token_ids"])) == (5, 4)


def test_without_max_tokens_a_completion_has_16_and_a_chat_the_rest_of_the_context(shared_app: Any):
    completion = shared_app.post("completions", {"prompt": "hello"}).json()
    assert completion["usage"]["completion_tokens"] == 16
    chat = shared_app.post("chat/completions", {"messages": HELLO}).json()
    assert chat["usage"]["total_tokens"] == MAX_MODEL_LEN
    near_end = shared_app.post("completions", {"prompt": "x" * (MAX_MODEL_LEN - 3)}).json()
    assert near_end["usage"]["completion_tokens"] == 3


def test_max_completion_tokens_counts_before_max_tokens(shared_app: Any):
    body = {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 2}
    assert shared_app.post("chat/completions", body).json()["usage"]["completion_tokens"] == 2


def test_a_stop_string_ends_the_text_and_the_usage(shared_app: Any):
    text = letters_after(5, 12)
    body = {"messages": HELLO, "max_tokens": 12, "stop": [text[4:6]]}
    answer = shared_app.post("chat/completions", body).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text[:4]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[4:6])
    assert answer["usage"]["completion_tokens"] == 6  # the stop string's own tokens, and none past it
    kept = shared_app.post("chat/completions", {**body, "include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["message"]["content"] == text[:6]


def test_a_stop_token_ends_the_text(shared_app: Any, tokenizer: Any):
    token = tokenizer.token_to_id(letters_after(5, 3)[-1])
    answer = shared_app.post("chat/completions", {"messages": HELLO, "max_tokens": 9, "stop_token_ids": [token]}).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == (letters_after(5, 2), token)


def test_chat_template_variables_reach_the_template(shared_app: Any):
    body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"suffix": "ab"}}
    assert shared_app.post("chat/completions", body).json()["usage"]["prompt_tokens"] == 7
    error = error_of(shared_app.post("chat/completions", {**body, "chat_template_kwargs": {"messages": []}}), 400)
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("mm_processor_kwargs", {"x": 1}),
    ],
)
def test_a_field_that_is_not_built_yet_is_refused_by_name(shared_app: Any, field: str, value: Any):
    for route, prompt in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "hello"})):
        error = error_of(shared_app.post(route, {**prompt, "max_tokens": 1, field: value}), 400)
        assert error["param"] == field
        assert error["message"].startswith(f"{field}=")
        assert "not supported yet" in error["message"]


def test_a_priority_is_refused_where_the_policy_would_ignore_it(shared_app: Any):
    error = error_of(shared_app.post("completions", {"prompt": "hello", "max_tokens": 1, "priority": 3}), 400)
    assert error["param"] == "priority"
    assert error["message"].startswith("priority=3 needs a server with --scheduling-policy priority")


def test_a_cache_salt_is_a_text_and_not_empty(shared_app: Any):
    body = {"prompt": "hello", "max_tokens": 1}
    assert shared_app.post("completions", {**body, "cache_salt": "mine"}).status_code == 200
    assert error_of(shared_app.post("completions", {**body, "cache_salt": ""}), 400)["param"] == "cache_salt"
    assert error_of(shared_app.post("completions", {**body, "cache_salt": 5}), 400)["param"] == "cache_salt"


def test_fields_that_ask_for_nothing_are_taken(shared_app: Any):
    nothing = {
        "n": 1,
        "logprobs": False,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": None,
        "tool_choice": "none",
        "user": "me",
        "temperature": None,
        "seed": None,
        "stop": None,
    }
    assert shared_app.post("chat/completions", {"messages": HELLO, "max_tokens": 1, **nothing}).status_code == 200


def test_an_unknown_field_is_ignored_with_a_warning(shared_app: Any, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert shared_app.post("completions", {"prompt": "a", "max_tokens": 1, "temprature": 1}).status_code == 200
    assert "temprature" in caplog.text


def test_a_model_that_is_not_served_is_not_found(shared_app: Any):
    error = error_of(shared_app.post("completions", {"model": "gpt-7", "prompt": "a"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-7'" in error["message"]
    assert "'alphabet'" in error["message"]
    assert error_of(shared_app.client.get("/v1/models/gpt-7"), 404)["code"] == "model_not_found"


def test_a_request_beyond_the_context_is_refused_with_the_numbers(shared_app: Any):
    error = error_of(shared_app.post("completions", {"prompt": "x" * 100, "max_tokens": 29}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 128 tokens" in error["message"]
    assert "129 tokens (100 in the prompt, 29 in the output)" in error["message"]
    assert "max_tokens to 28" in error["message"]
    assert shared_app.post("completions", {"prompt": "x" * 100, "max_tokens": 28}).status_code == 200
    for body in ({"messages": [{"role": "user", "content": "x" * 128}]},):
        error = error_of(shared_app.post("chat/completions", body), 400)
        assert "the prompt has 128" in error["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "messages: "),
        ({"messages": [{"content": "no role"}]}, "messages[0].role"),
        ({"messages": [3]}, "messages: "),
        ({}, "the field 'messages' is missing"),
        ({"messages": HELLO, "max_tokens": "many"}, "max_tokens: "),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": HELLO, "temperature": -1}, "temperature must be at least 0"),
        ({"messages": HELLO, "top_p": 7}, "top_p must be in (0, 1]"),
        ({"messages": HELLO, "stop": [1]}, "stop: "),
        ({"messages": HELLO, "stop_token_ids": [999]}, "stop_token_ids: token id 999"),
        ({"messages": HELLO, "stream_options": 3}, "stream_options: "),
        (
            {"messages": HELLO, "continue_final_message": True},
            "continue_final_message=True needs add_generation_prompt=False",
        ),
    ],
)
def test_a_malformed_chat_is_refused_in_one_line(shared_app: Any, body: dict[str, Any], says: str):
    assert says in error_of(shared_app.post("chat/completions", body), 400)["message"]


@pytest.mark.parametrize("prompt", [[], {}, 3, None, [1, "a"], [[1], "a"], [1.5], [True], [[1], [None]]])
def test_a_malformed_prompt_is_refused_in_one_line(shared_app: Any, prompt: Any):
    assert "prompt must be a text" in error_of(shared_app.post("completions", {"prompt": prompt}), 400)["message"]


def test_an_empty_prompt_and_ids_outside_the_vocabulary_are_refused(shared_app: Any):
    assert "empty" in error_of(shared_app.post("completions", {"prompt": ""}), 400)["message"]
    assert (
        "token id 256 at position 1" in error_of(shared_app.post("completions", {"prompt": [1, 256]}), 400)["message"]
    )


def test_a_body_that_is_no_json_object_is_refused(shared_app: Any):
    json_type = {"Content-Type": "application/json"}
    broken = shared_app.client.post("/v1/completions", content=b'{"prompt": "a",', headers=json_type)
    assert "not valid JSON" in error_of(broken, 400)["message"]
    for content, headers in ((b"[1]", json_type), (b'{"prompt": "a"}', {"Content-Type": "text/plain"})):
        error = error_of(shared_app.client.post("/v1/completions", content=content, headers=headers), 400)
        assert "must be a JSON object, sent with the header Content-Type: application/json" in error["message"]


def test_unknown_routes_and_wrong_methods_are_told_so(shared_app: Any):
    assert "/v1/embeddings" in error_of(shared_app.post("embeddings", {}), 404)["message"]
    error = error_of(shared_app.client.get("/v1/completions"), 405)
    assert "takes POST, not GET" in error["message"]


def test_a_failed_step_is_a_500_with_its_cause_and_the_server_goes_on(app: Any):
    app.runner.failure = RuntimeError("RESOURCE_EXHAUSTED: 3 GiB")
    error = error_of(app.post("completions", {"prompt": "a"}), 500)
    assert error["type"] == "server_error"
    assert "RESOURCE_EXHAUSTED: 3 GiB" in error["message"]
    events = app.events("completions", {"prompt": "a"})
    assert "RESOURCE_EXHAUSTED: 3 GiB" in events[-1]["error"]["message"]
    app.runner.failure = None
    assert app.client.get("/health").status_code == 200
    assert app.post("completions", {"prompt": "a"}).status_code == 200
    assert app.metrics()["request_success_total[error]"] == 2


def test_a_dead_engine_is_a_503_everywhere(app: Any):
    app.runner.failure = RuntimeError("device lost")
    app.runner.reset_failure = RuntimeError("no device")
    assert app.client.get("/health").status_code == 200
    error_of(app.post("completions", {"prompt": "a"}), 503)
    for response in (app.client.get("/health"), app.client.get("/ping"), app.post("completions", {"prompt": "a"})):
        error = error_of(response, 503)
        assert "no device" in error["message"]
        assert error["code"] == "engine_dead"


def test_a_bug_is_a_500_without_a_traceback(app: Any, monkeypatch: pytest.MonkeyPatch):
    def fail() -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(app.llm, "get_tokenizer", fail)
    error = error_of(app.post("completions", {"prompt": "a"}), 500)
    assert "KeyError" in error["message"]
    assert "secret" not in error["message"]


def test_a_client_that_leaves_its_stream_frees_its_blocks(app: Any):
    app.runner.step_seconds = 0.02
    body = {"prompt": ["ab", "abc"], "max_tokens": 100, "stream": True}
    with app.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # dropping it would close the connection
        next(lines)
        assert app.llm.stats.running == 2
    app.wait_for(app.is_empty)
    assert app.metrics()["request_success_total[abort]"] == 2


def test_a_client_that_does_not_wait_for_its_answer_frees_its_blocks(app: Any):
    app.runner.step_seconds = 0.02
    for route, prompt in (("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "ab"})):
        with pytest.raises(httpx.ReadTimeout):
            app.client.post(f"/v1/{route}", json={**prompt, "max_tokens": 100}, timeout=0.3)
        assert app.llm.stats.running == 1 or app.is_empty()
        app.wait_for(app.is_empty)
    assert app.metrics()["request_success_total[abort]"] == 2


def test_a_client_that_leaves_while_it_waits_is_forgotten(app: Any):
    app.runner.step_seconds = 0.02
    prompts = [f"{i:02}" for i in range(12)]  # more than there are rows
    with pytest.raises(httpx.ReadTimeout):
        app.client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 100}, timeout=0.4)
    app.wait_for(app.is_empty)


def test_an_abort_ends_a_stream_with_what_it_had(app: Any):
    app.runner.step_seconds = 0.02
    events: list[Any] = []
    body = {"prompt": "abc", "max_tokens": 100, "stream_options": {"include_usage": True}}
    thread = threading.Thread(target=lambda: events.extend(app.events("completions", body)))
    thread.start()
    app.wait_for(lambda: app.llm.stats.running == 1)
    assert asyncio.run(app.llm.abort_all()) == 1
    thread.join(20)
    assert events[-2]["choices"][0]["finish_reason"] == "abort"
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == letters_after(3, events[-1]["usage"]["completion_tokens"])


def test_metrics_count_every_token_that_was_given_and_no_other(app: Any):
    app.runner.step_seconds = 0.01
    told = 0
    text = letters_after(5, 12)
    for body in ({"prompt": "hello", "max_tokens": 9}, {"prompt": "hello", "max_tokens": 12, "stop": text[3:5]}):
        told += app.post("completions", body).json()["usage"]["completion_tokens"]
    assert told == 9 + 5
    for event in app.events("chat/completions", {"messages": HELLO, "max_tokens": 6}):
        told += len(event["choices"][0]["delta"]["content"])  # a letter for each token
    left_with = 0
    body = {"prompt": "hello", "max_tokens": 100, "stream": True}
    with app.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            left_with += line.startswith("data: ")
            if left_with == 7:
                break
    app.wait_for(app.is_empty)
    metrics = app.metrics()
    given_to_the_one_that_left = metrics["generation_tokens_total"] - told
    assert 7 <= given_to_the_one_that_left < 100
    assert metrics["prompt_tokens_total"] == 4 * 5
    assert metrics["request_prompt_tokens_sum"] == 4 * 5
    assert metrics["request_generation_tokens_sum"] == metrics["generation_tokens_total"]
    ended = {reason: metrics[f"request_success_total[{reason}]"] for reason in ("stop", "length", "abort", "error")}
    assert ended == {"stop": 1, "length": 2, "abort": 1, "error": 0}
    assert metrics["time_to_first_token_seconds_count"] == 4
    # Tokens that a busy front sends together are one group, from which on the next gap counts.
    assert 20 < metrics["inter_token_latency_seconds_count"] <= metrics["generation_tokens_total"] - 4
    assert metrics["e2e_request_latency_seconds_count"] == 4
    assert metrics["request_time_per_output_token_seconds_count"] == 4
    assert (metrics["num_requests_running"], metrics["num_requests_waiting"]) == (0, 0)
    assert metrics["kv_cache_usage_perc"] == 0


def test_gauges_follow_the_engine(app: Any):
    app.runner.step_seconds = 0.05
    body = {"prompt": [f"{i:02}" for i in range(12)], "max_tokens": 100, "stream": True}
    with app.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # dropping it would close the connection
        next(lines)
        metrics = app.metrics()
        assert (metrics["num_requests_running"], metrics["num_requests_waiting"]) == (8, 4)
        assert 0 < metrics["kv_cache_usage_perc"] <= 1


def test_a_busy_server_logs_its_throughput_and_an_idle_one_nothing(
    caplog: pytest.LogCaptureFixture, serve_app: Any, tokenizer: Any
):
    with caplog.at_level(logging.INFO), serve_app(tokenizer=tokenizer, log_stats_every=0.3) as app:
        app.runner.step_seconds = 0.02
        app.post("completions", {"prompt": "hello", "max_tokens": 40})
        assert re.search(r"running 1, waiting 0, KV use 0\.8%|running 1, waiting 0, KV use \d", caplog.text)
        assert re.search(r"generation [1-9]\d*\.\d tok/s", caplog.text)
        threading.Event().wait(0.7)
        caplog.clear()
        threading.Event().wait(0.7)
        assert "tok/s" not in caplog.text


def test_models_are_listed_under_the_names_given(serve_app: Any, tokenizer: Any):
    with serve_app(ServerArgs(served_model_name=("main", "alias")), tokenizer) as app:
        cards = app.client.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"], card["max_model_len"]) for card in cards] == [
            ("main", "alphabet", 128),
            ("alias", "alphabet", 128),
        ]
        assert app.client.get("/v1/models/alias").json() == cards[1]
        for name in ("main", "alias"):
            assert app.post("completions", {"model": name, "prompt": "a"}).json()["model"] == "main"
        error_of(app.post("completions", {"model": "alphabet", "prompt": "a"}), 404)


def test_flags_of_the_server_are_obeyed(serve_app: Any, tokenizer: Any):
    args = ServerArgs(response_role="bot", enable_prompt_tokens_details=True, disable_fastapi_docs=True)
    with serve_app(args, tokenizer) as app:
        answer = app.post("chat/completions", {"messages": HELLO, "max_tokens": 1}).json()
        assert answer["choices"][0]["message"]["role"] == "bot"
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert app.client.get("/docs").status_code == 404


def test_without_a_tokenizer_ids_come_in_and_go_out(serve_app: Any):
    with serve_app() as app:
        answer = app.post("completions", {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}).json()
        assert (answer["choices"][0]["text"], len(answer["choices"][0]["token_ids"])) == ("", 3)
        assert "needs a tokenizer" in error_of(app.post("completions", {"prompt": "a"}), 400)["message"]
        assert "needs a tokenizer" in error_of(app.post("chat/completions", {"messages": HELLO}), 400)["message"]
        assert "stop_token_ids" in error_of(app.post("completions", {"prompt": [1], "stop": "a"}), 400)["message"]


def test_probes_and_documentation_are_there(shared_app: Any):
    assert shared_app.client.get("/health").content == b""
    assert [shared_app.client.request(method, "/ping").status_code for method in ("GET", "POST")] == [200, 200]
    assert shared_app.client.get("/version").json() == {"version": __version__}
    routes = shared_app.client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= routes.keys()
    prompt = shared_app.client.get("/openapi.json").json()["components"]["schemas"]["CompletionRequest"]["properties"][
        "prompt"
    ]
    assert len(prompt["anyOf"]) == 4


def test_a_page_of_another_origin_may_read_the_answers(shared_app: Any):
    response = shared_app.client.get("/v1/models", headers={"Origin": "http://127.0.0.1:3000"})
    assert response.headers["Access-Control-Allow-Origin"] == "*"
