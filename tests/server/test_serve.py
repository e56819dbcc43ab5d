import json
import shlex
from types import SimpleNamespace
from typing import Any, cast

from jaxllm.config.server_args import ServerArgs
from jaxllm.server.serve import greeting
from jaxllm.text.tokenizer import Tokenizer


def told(
    tokenizer: Tokenizer | None, host: str = "127.0.0.1", name: str = "m", args: ServerArgs | None = None
) -> tuple[str, str, dict[str, Any]]:
    """The greeting, and the route and body of its curl command as a shell reads it."""
    llm = cast(Any, SimpleNamespace(get_tokenizer=lambda: tokenizer))
    text = greeting(llm, args or ServerArgs(), name, host, 8000)
    (line,) = (line for line in text.splitlines() if "curl" in line)
    words = shlex.split(line)
    return text, next(word for word in words if word.startswith("http")), json.loads(words[-1])


def test_the_greeting_has_a_chat_to_paste_where_the_model_chats(tokenizer: Tokenizer):
    text, url, body = told(tokenizer, name="it's me")
    assert url == "http://127.0.0.1:8000/v1/chat/completions"
    assert body["model"] == "it's me"
    assert body["messages"][0]["role"] == "user"
    assert "Ctrl-C stops it" in text


def test_the_greeting_has_a_completion_to_paste_where_it_does_not(tokenizer: Tokenizer):
    base = Tokenizer(tokenizer.backend)
    assert told(base)[1].endswith("/v1/completions")
    assert isinstance(told(base)[2]["prompt"], str)
    assert told(None)[2]["prompt"] == [1, 2, 3]


def test_the_greeting_names_an_address_that_can_be_reached(tokenizer: Tokenizer):
    text, url, _ = told(tokenizer, host="0.0.0.0")
    assert url.startswith("http://127.0.0.1:8000/")
    assert "every other interface" in text
    assert told(tokenizer, host="::1")[1].startswith("http://[::1]:8000/")


def test_the_greeting_says_how_to_pass_tls_keys_and_a_unix_socket(tokenizer: Tokenizer):
    args = ServerArgs(ssl_certfile="c.pem", api_key=("hunter2",))
    text, url, _ = told(tokenizer, args=args)
    assert url.startswith("https://127.0.0.1:8000/")
    assert "-H 'Authorization: Bearer KEY'" in text
    assert "hunter2" not in text
    text, url, _ = told(tokenizer, args=ServerArgs(uds="/run/my server.sock"))
    assert "curl --unix-socket '/run/my server.sock' http://localhost/v1/" in text
