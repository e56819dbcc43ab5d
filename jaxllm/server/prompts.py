"""What a body calls a prompt, or a chat -> text and token ids. Knows tokenizer and template; no sampling, no engine."""

import asyncio
from collections.abc import Callable
from typing import Any

from jaxllm.api.engine_client import EngineClient
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.config.errors import InputError
from jaxllm.server.errors import ApiError
from jaxllm.server.protocol import ChatTemplateFields
from jaxllm.server.terms import Terms
from jaxllm.text.tokenizer import Tokenizer

_LONG_TEXT = 16_384  # characters from which tokenizing would hold up other requests' streams for milliseconds
_NOT_TEMPLATE_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "template")
)


def tokenizer_for_chats(llm: EngineClient) -> Tokenizer:
    """Gives the tokenizer.

    Raises:
        ApiError: the server has none.
    """
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ApiError("a chat needs a tokenizer, and this server has none: send token ids to /v1/completions")
    return tokenizer


def render(tokenizer: Tokenizer, body: ChatTemplateFields, terms: Terms) -> str:
    """Writes a chat as the model reads it; variables of the request override those of the server.

    Raises:
        ApiError: a template of the request's own without leave, a variable that is none, or messages at fault.
    """
    if body.chat_template is not None and not terms.trusts_templates:
        raise ApiError(
            "chat_template needs a server with --trust-request-chat-template; leave it out", param="chat_template"
        )
    variables = {**terms.template_variables, **(body.chat_template_kwargs or {})}
    if body.documents:
        variables["documents"] = body.documents
    if clash := variables.keys() & _NOT_TEMPLATE_VARIABLES:
        raise ApiError(f"{min(clash)!r} is not a variable of the chat template", param="chat_template_kwargs")
    try:
        return tokenizer.render_chat(
            body.messages,
            body.add_generation_prompt,
            chat_template=body.chat_template,
            continue_final_message=body.continue_final_message,
            **variables,
        )
    except InputError as error:
        raise ApiError(str(error), param="messages") from None


def split_prompts(prompt: object) -> list[str | list[int]]:
    """Reads the four shapes of a prompt: a text, texts, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _all(prompt, lambda each: type(each) is int):
            return [prompt]
        if _all(prompt, lambda each: isinstance(each, str)):
            return prompt
        if _all(prompt, lambda each: isinstance(each, list) and _all(each, lambda token: type(token) is int)):
            return prompt
    wanted = "prompt must be a text, a list of texts, a list of token ids, or a list of lists of token ids"
    raise ApiError(f"{wanted}, got {prompt!r:.60}", param="prompt")


def _all(items: list[Any], fits: Callable[[Any], bool]) -> bool:
    return all(map(fits, items))


async def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str) -> TokenizedPrompt:
    """Tokenizes a text; a long one in a thread of its own.

    Raises:
        ApiError: it is no valid Unicode; `param` names the field that it came in.
    """
    try:
        if len(text) < _LONG_TEXT:
            return TokenizedPrompt(tokenizer.encode(text, add_special_tokens), text)
        return TokenizedPrompt(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens), text)
    except InputError as error:
        raise ApiError(str(error), param=param) from None


async def tokenized_prompt(
    tokenizer: Tokenizer | None, prompt: str | list[int], add_special_tokens: bool
) -> TokenizedPrompt:
    """Tokenizes one prompt, unless it is token ids already.

    Raises:
        ApiError: it is text, and there is no tokenizer, or it is no valid Unicode.
    """
    if isinstance(prompt, list):
        return TokenizedPrompt(prompt)
    if tokenizer is None:
        raise ApiError("a text prompt needs a tokenizer, and this server has none: send token ids", param="prompt")
    return await encode(tokenizer, prompt, add_special_tokens, param="prompt")
