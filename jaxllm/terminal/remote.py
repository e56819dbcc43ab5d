"""A model on a server with OpenAI's API that answers at a terminal. Knows HTTP and server-sent events; no engine."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from jaxllm.config.errors import InputError
from jaxllm.terminal.answers import AnswerLost, Message, Write
from jaxllm.terminal.args import CompleteArgs

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


class RemoteModel:
    """Asks a server that runs already.

    Raises:
        InputError: it does not answer, or serves nothing.
    """

    def __init__(self, args: CompleteArgs):
        assert args.url is not None
        self._url = _address(args.url)
        self._sampling = args.sampling()
        key = args.api_key or os.environ.get("OPENAI_API_KEY")
        self._client = httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=_TIMEOUT)
        self.name = args.model_name or self._first_model()

    def chat(self, messages: Sequence[Message], write: Write) -> None:
        """Answers through the server's chat route."""
        for choice in self._choices("chat/completions", {"messages": list(messages)}):
            write(choice.get("delta", {}).get("content") or "")

    def complete(self, prompt: str, write: Write) -> None:
        """Continues a text through the server's completions route."""
        for choice in self._choices("completions", {"prompt": prompt}):
            write(choice.get("text") or "")

    def close(self) -> None:
        self._client.close()

    def _first_model(self) -> str:
        with self._one_line():
            response = self._client.get(f"{self._url}/models")
            _check(response, self._url)
            try:
                models = [model["id"] for model in response.json()["data"]]
            except (ValueError, KeyError, TypeError):
                raise InputError(f"what answers at {self._url} does not speak OpenAI's API") from None
        if not models:
            raise InputError(f"{self._url} serves no model")
        return models[0]

    def _choices(self, route: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the first choice of each event. Leaving early closes the connection, which aborts the request."""
        body = {"model": self.name, "stream": True, **self._sampling, **body}
        with self._one_line(), self._client.stream("POST", f"{self._url}/{route}", json=body) as response:
            if response.is_error:
                response.read()
            _check(response, self._url)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise AnswerLost(f"{self._url}: {_message(event)}")
                    yield from event.get("choices", [])[:1]
        raise AnswerLost(f"{self._url} ended the connection before the answer was whole")

    @contextmanager
    def _one_line(self) -> Iterator[None]:
        """Words what can go wrong on the way as one line."""
        try:
            yield
        except httpx.ConnectError:
            raise InputError(
                f"nothing answers at {self._url}: start a server with `jaxllm serve`, or leave --url out to run the "
                "model in this process"
            ) from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise InputError(f"url={self._url!r} is no address: {error}") from None
        except httpx.HTTPError as error:
            raise AnswerLost(f"{self._url}: {type(error).__name__}: {error}") from None


def _address(url: str) -> str:
    """Gives the address without a slash at its end; OpenAI's routes lie below /v1 unless the user says otherwise."""
    scheme, _, rest = url.rstrip("/").partition("://")
    if not rest:
        raise InputError(f"url={url!r} is no address; it looks like http://localhost:8000/v1")
    return f"{scheme}://{rest}" if "/" in rest else f"{scheme}://{rest}/v1"


def _check(response: httpx.Response, url: str) -> None:
    if not response.is_error:
        return
    try:
        said = _message(response.json())
    except ValueError:
        said = response.reason_phrase
    raise InputError(f"{url} answers {response.status_code}: {said}")


def _message(body: Any) -> str:
    """The message of OpenAI's error, or what stands in its place."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message") or error.get("detail") or error if isinstance(error, dict) else error
    return " ".join(str(text).split())
