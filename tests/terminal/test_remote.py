"""A scripted server behind a real socket: what it says well and ill reaches the terminal as text or as one line."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxllm.config.errors import InputError
from jaxllm.terminal.answers import AnswerLost
from jaxllm.terminal.args import CompleteArgs
from jaxllm.terminal.remote import RemoteModel

MESSAGES = [{"role": "user", "content": "hello"}]


class Script:
    """What the server answers, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.body = ""
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []

    def says(self, *events: object, done: bool = True) -> None:
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        self.body = ": a comment\n\n" + "".join(lines) + ("data: [DONE]\n\n" if done else "")


@pytest.fixture
def server() -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(json.dumps({"data": [{"id": "first"}, {"id": "second"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append((self.path, body, self.headers["Authorization"]))
            self._answer(script.body)

        def _answer(self, text: str) -> None:
            self.send_response(script.status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    script.url = f"http://127.0.0.1:{listening.server_address[1]}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
    thread.start()
    yield script
    listening.shutdown()
    thread.join()
    listening.server_close()


def chat(server: Script, **flags: Any) -> str:
    model, pieces = RemoteModel(CompleteArgs(url=server.url, **flags)), []
    try:
        model.chat(MESSAGES, pieces.append)
    finally:
        model.close()
    return "".join(pieces)


def test_an_answer_is_the_text_of_its_events(server: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server.says(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "héllo"}}]},
        {"choices": [{"delta": {"content": " you"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {}},
    )
    assert chat(server, temperature=0.5, max_tokens=7) == "héllo you"
    ((path, body, key),) = server.asked
    assert path == "/v1/chat/completions"
    assert body == {"model": "first", "stream": True, "messages": MESSAGES, "temperature": 0.5, "max_tokens": 7}
    assert key is None


def test_a_text_is_continued_with_the_named_model_and_the_key(server: Script):
    server.says({"choices": [{"text": " time"}]})
    pieces: list[str] = []
    RemoteModel(CompleteArgs(url=f"{server.url}/v1/", model_name="mine", api_key="k")).complete("a", pieces.append)
    assert pieces == [" time"]
    assert server.asked == [("/v1/completions", {"model": "mine", "stream": True, "prompt": "a"}, "Bearer k")]


def test_the_key_may_stand_in_the_environment(server: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server.says()
    chat(server)
    assert server.asked[0][2] == "Bearer secret"


def test_what_the_server_refuses_is_told_in_its_words(server: Script):
    server.status, server.body = 400, json.dumps({"error": {"message": "the prompt\nis empty"}})
    with pytest.raises(InputError, match="answers 400: the prompt is empty"):
        chat(server, model_name="mine")
    server.status, server.body = 502, "<html>"
    with pytest.raises(InputError, match="answers 502: Bad Gateway"):
        chat(server, model_name="mine")


def test_an_error_within_a_stream_and_an_end_before_its_time_are_lost_answers(server: Script):
    server.says({"choices": [{"delta": {"content": "a"}}]}, {"error": {"message": "a step failed"}})
    with pytest.raises(AnswerLost, match="a step failed"):
        chat(server)
    server.says({"choices": [{"delta": {"content": "a"}}]}, done=False)
    with pytest.raises(AnswerLost, match="ended the connection before the answer was whole"):
        chat(server)


def test_where_nothing_answers_is_told_what_to_start(server: Script):
    with pytest.raises(
        InputError, match=r"nothing answers at http://127.0.0.1:9/v1: start a server with `jaxllm serve`"
    ):
        RemoteModel(CompleteArgs(url="http://127.0.0.1:9"))


@pytest.mark.parametrize("url", ["localhost", "localhost:8000/v1", "", "ftp://127.0.0.1/v1"])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(InputError, match="is no address"):
        RemoteModel(CompleteArgs(url=url))


def test_a_server_that_speaks_another_language_is_refused(server: Script, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("json.dumps", lambda content: "pong")
    with pytest.raises(InputError, match="does not speak OpenAI's API"):
        RemoteModel(CompleteArgs(url=server.url))
