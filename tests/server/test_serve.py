import json
import shlex
from types import SimpleNamespace
from typing import Any, cast

from jaxllm.server.serve import greeting
from jaxllm.text.tokenizer import Tokenizer


def told(tokenizer: Tokenizer | None, host: str = "127.0.0.1", name: str = "m") -> tuple[str, str, dict[str, Any]]:
    """The greeting, and the route and body of its curl command as a shell reads it."""
    text = greeting(cast(Any, SimpleNamespace(get_tokenizer=lambda: tokenizer)), name, host, 8000)
    (line,) = (line for line in text.splitlines() if "curl" in line)
    words = shlex.split(line)
    return text, words[1], json.loads(words[-1])


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
