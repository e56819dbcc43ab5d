"""Whatever comes in over HTTP, there is an answer in time, and no 500."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxllm.config.server_args import ServerArgs
from jaxllm.server.protocol import ChatRequest, CompletionRequest
from jaxllm.server.refused_fields import REFUSED_FIELDS
from jaxllm.server.tokenize import DetokenizeRequest, TokenizeRequest
from jaxllm.server.tokens_in_out import CLIENT_FIELDS, GenerateRequest

QUICK = settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SECONDS = 10.0  # a request that takes longer hangs
BODIES = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions/render": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/tokenize": (TokenizeRequest, {"prompt": "hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2]}),
    "/inference/v1/generate": (GenerateRequest, {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}),
}
ODD = st.sampled_from(
    [
        *(
            None,
            True,
            False,
            0,
            1,
            -1,
            2,
            0.5,
            10**30,
            -(10**30),
            2**31,
            2**63,
            1e308,
            -1e308,
            float("nan"),
            float("inf"),
        ),
        *("", "a", "\ud800", "\x00", "auto", "1", [], [1], ["a"], [[]], [None], [2**31], {}, {"a": 1}, {"1": 5}),
        *({"role": "user"}, [{"role": "user", "content": "x"}], {"type": "text"}, [[1], ["a"]]),
    ]
)


@pytest.fixture(scope="module")
def fuzzed(serve_app: Any, tokenizer: Any) -> Iterator[Any]:
    args = ServerArgs(trust_request_chat_template=True, request_timeout=3.0, enable_prompt_tokens_details=True)
    with serve_app(args, tokenizer) as app:
        yield app
        assert app.client.get("/health").status_code == 200
        app.wait_for(app.is_empty)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route, and a body that is right but for a few fields."""
    route = draw(st.sampled_from(sorted(BODIES)))
    model, right = BODIES[route]
    names = sorted({*model.model_fields, *REFUSED_FIELDS, "unheard_of"})
    body = {**right, **draw(st.dictionaries(st.sampled_from(names), ODD, min_size=1, max_size=3))}
    if route == "/inference/v1/generate" and isinstance(body["sampling_params"], dict):
        params = draw(st.dictionaries(st.sampled_from(sorted(CLIENT_FIELDS)), ODD, max_size=3))
        body["sampling_params"] = {**body["sampling_params"], **params}
    return route, body


@QUICK
@given(bodies())
def test_odd_values_in_known_fields_are_answered_or_refused(fuzzed: Any, case: tuple[str, dict[str, Any]]):
    route, body = case
    headers = {"Content-Type": "application/json"}
    response = fuzzed.client.post(route, content=json.dumps(body), headers=headers, timeout=SECONDS)
    assert response.status_code in (200, 400, 404, 422), (body, response.text)
    assert '"server_error"' not in response.text, (body, response.text)


HOLDERS = ("logit_bias", "allowed_token_ids", "stop_token_ids", "logprob_token_ids", "bad_words", "extra_args")
NUMBERS = [*(-1, 0, 1, 3, 127, 2**31, 2**63, 2**70, -(2**31), 0.5, 1e-320, 1e38, 1e308, -1e308), float("nan")]


def test_no_number_in_any_parameter_of_sampling_fails_a_step(fuzzed: Any):
    for name in sorted(CLIENT_FIELDS):
        for value in NUMBERS:
            holders = ([value], {"1": value}, {str(value): 1}) if name in HOLDERS else ()
            for odd in (value, *holders):
                room = None if name == "min_tokens" else 2
                params = {"max_tokens": room, "temperature": 0.7, "top_k": 5, name: odd}
                body = json.dumps({"token_ids": [1] * 100, "sampling_params": params})
                headers = {"Content-Type": "application/json"}
                response = fuzzed.client.post("/inference/v1/generate", content=body, headers=headers)
                assert response.status_code in (200, 400), (name, odd, response.text)


@QUICK
@given(st.sampled_from(sorted(BODIES)), st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_bytes_that_are_no_json_are_refused(fuzzed: Any, route: str, content: bytes):
    headers = {"Content-Type": "application/json", "X-Request-Timeout": "2"}
    response = fuzzed.client.post(route, content=content, headers=headers, timeout=SECONDS)
    assert response.status_code == 400, (content, response.text)


def test_json_that_is_nested_deeply_is_refused(fuzzed: Any):
    headers = {"Content-Type": "application/json"}
    for content in (b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        response = fuzzed.client.post("/v1/completions", content=content, headers=headers, timeout=SECONDS)
        assert response.status_code == 400


@QUICK
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), st.sampled_from(["GET", "POST", "PUT", "HEAD"]))
def test_any_path_and_method_has_an_answer(fuzzed: Any, path: str, method: str):
    url = httpx.URL(fuzzed.url, raw_path=b"/v1/models/" + b"".join(b"%%%02x" % byte for byte in path.encode()))
    assert fuzzed.client.request(method, url, timeout=SECONDS).status_code < 500


@settings(QUICK, max_examples=40)
@given(st.binary(min_size=1, max_size=200))
def test_bytes_that_are_no_http_close_the_connection_and_nothing_else(fuzzed: Any, content: bytes):
    host, port = fuzzed.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
        connection.sendall(content + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer
