"""Samples and log-probabilities over HTTP, in the shapes of OpenAI and vLLM, over the scripted engine."""

from typing import Any

import httpx
import openai
import pytest

from jaxllm.api.logprobs import Logprob
from jaxllm.server.logprobs import CompletionLogprobs, LogprobStyle, chat_logprobs, prompt_logprobs_json

HELLO = [{"role": "user", "content": "hello"}]
ROUTES = [("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "hello"})]


def letters_after(num_tokens: int, count: int) -> str:
    return "".join(chr(ord("a") + (num_tokens + i) % 26) for i in range(count))


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400
    return response.json()["error"]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"])["content"]


@pytest.mark.parametrize(("route", "prompt"), ROUTES)
def test_n_samples_are_choices_and_a_stream_names_the_index_of_each_chunk(shared_app: Any, route: str, prompt: Any):
    body = {**prompt, "n": 3, "max_tokens": 4, "seed": 5}
    answer = shared_app.post(route, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [text_of(choice) for choice in answer["choices"]] == [letters_after(5, 4)] * 3
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    texts, roles, ends = [""] * 3, [0] * 3, [""] * 3
    events = shared_app.events(route, {**body, "stream_options": {"include_usage": True}})
    for event in events[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += text_of(choice)
        roles[choice["index"]] += "role" in choice.get("delta", {})
        ends[choice["index"]] = choice["finish_reason"]
    assert texts == [letters_after(5, 4)] * 3
    assert ends == ["length"] * 3
    assert roles == [1 if "chat" in route else 0] * 3
    assert events[-1]["usage"]["completion_tokens"] == 12


def test_prompts_times_samples_have_an_index_each(shared_app: Any):
    body = {"prompt": ["hi", "hello"], "n": 2, "max_tokens": 3}
    answer = shared_app.post("completions", body).json()
    expected = [letters_after(2, 3)] * 2 + [letters_after(5, 3)] * 2
    assert [choice["text"] for choice in answer["choices"]] == expected
    texts = [""] * 4
    for event in shared_app.events("completions", body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == expected


def test_a_chats_logprobs_have_the_token_its_bytes_and_the_best(shared_app: Any):
    body = {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    (choice,) = shared_app.post("chat/completions", body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list(letters_after(5, 3))
    assert content[0] == {
        "token": "f",
        "logprob": -0.25,
        "bytes": [102],
        "top_logprobs": [
            {"token": "f", "logprob": -0.25, "bytes": [102]},
            {"token": "g", "logprob": -0.5, "bytes": [103]},
        ],
    }
    streamed = [event["choices"][0]["logprobs"] for event in shared_app.events("chat/completions", body)]
    assert [entry for piece in streamed if piece for entry in piece["content"]] == content
    (plain,) = shared_app.post("chat/completions", {**body, "top_logprobs": None}).json()["choices"]
    assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[], [], []]
    (none,) = shared_app.post("chat/completions", {"messages": HELLO, "max_tokens": 3}).json()["choices"]
    assert none["logprobs"] is None


def test_a_completions_logprobs_have_offsets_into_the_text(shared_app: Any):
    body = {"prompt": "hello", "max_tokens": 3, "logprobs": 1}
    (choice,) = shared_app.post("completions", body).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["f", "g", "h"],
        "token_logprobs": [-0.25] * 3,
        "top_logprobs": [{"f": -0.25}, {"g": -0.25}, {"h": -0.25}],
        "text_offset": [0, 1, 2],
    }
    streamed = [event["choices"][0]["logprobs"] for event in shared_app.events("completions", body)]
    for field, whole in choice["logprobs"].items():
        assert [entry for piece in streamed if piece for entry in piece[field]] == whole


def test_tokens_past_a_stop_string_have_no_logprobs(shared_app: Any):
    body = {"prompt": "hello", "max_tokens": 9, "logprobs": 0, "stop": "h"}
    (choice,) = shared_app.post("completions", body).json()["choices"]
    assert choice["text"] == "fg"
    assert choice["logprobs"]["tokens"] == ["f", "g", "h"]
    events = shared_app.events("completions", body)
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [token for piece in streamed if piece for token in piece["tokens"]] == ["f", "g", "h"]


@pytest.mark.parametrize("n", [1, 2])
def test_echo_gives_the_prompt_back_with_its_scores(shared_app: Any, n: int):
    body = {"prompt": ["hi", "hey"], "max_tokens": 2, "echo": True, "logprobs": 2, "n": n}
    answer = shared_app.post("completions", body).json()
    texts = ["hi" + letters_after(2, 2)] * n + ["hey" + letters_after(3, 2)] * n
    assert [choice["text"] for choice in answer["choices"]] == texts
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["h", "i", "c", "d"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"] == [None, {"i": -0.25, "j": -0.5}, {"c": -0.25, "d": -0.5}, {"d": -0.25, "e": -0.5}]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    streamed: list[Any] = [{"text": "", "tokens": []} for _ in texts]
    for event in shared_app.events("completions", body):
        (choice,) = event["choices"]
        streamed[choice["index"]]["text"] += choice["text"]
        streamed[choice["index"]]["tokens"] += (choice["logprobs"] or {"tokens": []})["tokens"]
    assert [each["text"] for each in streamed] == texts
    assert [each["tokens"] for each in streamed] == [choice["logprobs"]["tokens"] for choice in answer["choices"]]
    ids = [shared_app.llm.get_tokenizer().encode(prompt) for prompt in ("hi", "hey")]
    assert shared_app.post("completions", {**body, "prompt": ids}).json()["choices"] == answer["choices"]


def test_echo_of_no_output_scores_the_prompt_only(shared_app: Any):
    body = {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = shared_app.post("completions", body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("hello", list("hello"))
    assert answer["usage"]["completion_tokens"] == 0
    (event,) = shared_app.events("completions", body)
    assert (event["choices"][0]["text"], event["choices"][0]["logprobs"]["tokens"]) == ("hello", list("hello"))
    assert (
        "max_tokens must be at least 1" in error_of(shared_app.post("completions", {**body, "echo": False}))["message"]
    )


@pytest.mark.parametrize(("route", "prompt"), ROUTES)
def test_prompt_logprobs_are_told_by_token_id_and_not_in_a_stream(shared_app: Any, route: str, prompt: Any):
    body = {**prompt, "max_tokens": 1, "prompt_logprobs": 1}
    answer = shared_app.post(route, body).json()
    told = (answer if "chat" in route else answer["choices"][0])["prompt_logprobs"]
    (e,) = shared_app.llm.get_tokenizer().encode("e")
    assert (len(told), told[0]) == (5, None)
    assert told[1] == {str(e): {"logprob": -0.25, "rank": 1, "decoded_token": "e"}}
    error = error_of(shared_app.post(route, {**body, "stream": True}))
    assert error["param"] == "prompt_logprobs"


@pytest.mark.parametrize(("route", "prompt"), ROUTES)
def test_tokens_are_named_by_id_where_the_client_wants_it_and_named_ones_are_told(
    shared_app: Any, route: str, prompt: Any
):
    body = {**prompt, "max_tokens": 1, "return_tokens_as_token_ids": True, "logprob_token_ids": [9]}
    (choice,) = shared_app.post(route, body).json()["choices"]
    (f,) = shared_app.llm.get_tokenizer().encode("f")
    if "chat" in route:
        (entry,) = choice["logprobs"]["content"]
        assert entry["token"] == f"token_id:{f}"
        assert [(best["token"], best["logprob"]) for best in entry["top_logprobs"]] == [("token_id:9", -7.0)]
    else:
        assert choice["logprobs"]["tokens"] == [f"token_id:{f}"]
        assert choice["logprobs"]["top_logprobs"] == [{"token_id:9": -7.0, f"token_id:{f}": -0.25}]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs=21, more than max_logprobs 20"),
        ({"logprobs": True, "top_logprobs": -2}, "logprobs must be -1"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21, more than max_logprobs 20"),
        ({"n": 0}, "n must be from 1"),
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ({"min_p": 2}, "min_p must be"),
        ({"presence_penalty": 3}, "presence_penalty must be"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens 9 is above max_tokens 3"),
        ({"logit_bias": {"300": 1}}, "logit_bias: token id 300"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be a non-empty list"),
        ({"bad_words": [""]}, "bad_words must be non-empty"),
        ({"echo": True}, "echo=True is not supported yet"),
    ],
)
def test_a_mistake_in_a_sampling_field_is_one_line(shared_app: Any, fields: dict[str, Any], says: str):
    error = error_of(shared_app.post("chat/completions", {"messages": HELLO, **fields}))
    assert says in error["message"]
    assert "\n" not in error["message"]


def test_sampling_fields_reach_the_engine(app: Any, monkeypatch: pytest.MonkeyPatch):
    engine = app.llm._built.engine
    seen: list[Any] = []
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda *args: (seen.append(args[2]), add(*args)))
    fields: dict[str, Any] = {
        "n": 2,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "logit_bias": {"5": 2.5},
        "allowed_token_ids": [1, 2],
        "seed": 3,
    }
    app.post("completions", {"prompt": "hello", "max_tokens": 2, **fields, "bad_words": ["no"]})
    (params,) = seen
    assert {name: getattr(params, name) for name in fields} == fields | {"logit_bias": {5: 2.5}}
    assert len(params.bad_word_token_ids) == 1


def test_openais_client_reads_what_it_is_given(shared_app: Any):
    client: Any = openai.OpenAI(base_url=f"{shared_app.url}/v1", api_key="none", max_retries=0)
    with client:
        chat = client.chat.completions.create(
            model="alphabet", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=1, n=2
        )
        assert [each.logprobs.content[0].top_logprobs[0].token for each in chat.choices] == ["f", "f"]
        text = client.completions.create(model="alphabet", prompt="hello", max_tokens=2, logprobs=1, echo=True)
        assert text.choices[0].logprobs.tokens == list("hellofg")


def test_a_token_that_is_not_among_the_best_is_told_by_completions_and_not_by_chats():
    position = {7: Logprob(-5.0, 9, "z"), 1: Logprob(-0.1, 1, "a"), 2: Logprob(-0.2, 2, "b")}
    style = LogprobStyle(num_top=2)
    (entry,) = chat_logprobs([7], [position], style)["content"]
    assert [best["token"] for best in entry["top_logprobs"]] == ["a", "b"]
    shaped = CompletionLogprobs(style).shape([7], [position])
    assert shaped["top_logprobs"] == [{"a": -0.1, "b": -0.2, "z": -5.0}]


def test_json_gets_no_infinity_and_of_tokens_with_one_text_the_better():
    position = {1: Logprob(float("-inf"), 3, "a"), 2: Logprob(-0.2, 1, "b"), 3: Logprob(-0.3, 2, "b")}
    shaped = CompletionLogprobs(LogprobStyle(num_top=-1)).shape([1], [position])
    assert shaped["top_logprobs"] == [{"b": -0.2, "a": -9999.0}]
    assert shaped["token_logprobs"] == [-9999.0]
    assert prompt_logprobs_json([None, position])[1]["1"]["logprob"] == -9999.0  # pyright: ignore[reportOptionalSubscript]
