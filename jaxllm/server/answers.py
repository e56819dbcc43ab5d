"""Answers -> OpenAI's JSON shapes, as plain dicts: one is made per token, so nothing is validated. Knows no request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

type Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk of an answer repeats."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def shape(self, kind: str, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """Puts choices below the head."""
        shaped = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return shaped if usage is None else {**shaped, "usage": usage}


@dataclass(slots=True)
class Usage:
    """Tokens of a request with all its prompts; cached ones are told only where the server is started so."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None

    def shape(self) -> Json:
        """Shapes usage as OpenAI does."""
        usage: Json = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }
        if self.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        return usage


def choice(
    index: int,
    content: Json,
    finish_reason: str | None,
    stop_reason: int | str | None,
    token_ids: Sequence[int] | None = None,
    logprobs: Json | None = None,
) -> Json:
    """One choice, whole or a piece of it; `content` is what differs between chats and completions."""
    shaped = {
        "index": index,
        **content,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
    return shaped if token_ids is None else {**shaped, "token_ids": token_ids}


def model_card(name: str, root: str, created: int, max_model_len: int) -> Json:
    """One entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxllm",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
    }


CHAT = "chat.completion"
CHAT_CHUNK = "chat.completion.chunk"
COMPLETION = "text_completion"
