"""What a user may call a prompt -> token ids. Knows the tokenizer's interface; no engine."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.config.errors import InputError
from jaxllm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the engine takes it; text is None where the user gave ids."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None  # prompts of different salt never share KV blocks


def tokenize_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> TokenizedPrompt:
    """Takes text, a list of token ids, or a mapping with "prompt" or "prompt_token_ids", and "cache_salt" if wanted.

    Raises:
        InputError: it is none of these, or it is text and there is no tokenizer.
    """
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
            raise InputError(f"a prompt mapping has 'prompt' or 'prompt_token_ids', got {sorted(map(str, prompt))}")
        salt = prompt.get("cache_salt")
        if salt is not None and not (isinstance(salt, str) and salt):
            raise InputError(f"cache_salt must be a non-empty string, got {salt!r:.60}")
        if "prompt_token_ids" in prompt:
            return TokenizedPrompt(_token_ids(prompt["prompt_token_ids"]), prompt.get("prompt"), salt)
        return dataclasses.replace(tokenize_prompt(prompt["prompt"], tokenizer), cache_salt=salt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InputError("a text prompt needs a tokenizer, and skip_tokenizer_init is set: give prompt_token_ids")
        return TokenizedPrompt(tokenizer.encode(prompt), prompt)
    return TokenizedPrompt(_token_ids(prompt))


def _token_ids(ids: object) -> list[int]:
    tolist = getattr(ids, "tolist", None)  # numpy and jax arrays
    ids = tolist() if tolist is not None else ids
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(type(token) is int for token in ids):
        raise InputError(f"token ids must be a list of integers, got {ids!r:.60}")
    return list(ids)


def prompt_list(prompts: object) -> list[Prompt]:
    """One prompt or a list of them -> a list; a list of integers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    tolist = getattr(prompts, "tolist", None)  # numpy and jax arrays
    prompts = tolist() if tolist is not None else prompts
    if not isinstance(prompts, Sequence):
        raise InputError(
            f"prompts must be text, token ids, a mapping, or a list of these, got {type(prompts).__name__}"
        )
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)  # pyright: ignore[reportReturnType]
