"""A request's body -> prompts as token ids and SamplingParams, checked before anything runs. Runs nothing itself."""

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.api.async_llm import AsyncLLM
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.config.errors import InputError
from jaxllm.config.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.server.errors import ApiError
from jaxllm.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jaxllm.server.refused_fields import check_extra_fields
from jaxllm.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
_LONG_TEXT = 16_384  # characters from which tokenizing would hold up other requests' streams for milliseconds
_NOT_TEMPLATE_VARIABLES = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "template")
)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One prompt to run: what AsyncLLM.stream takes, and the text that the answer begins with.

    The output of a request that wants none of it is dropped: the engine samples one token all the same.
    """

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int = 0
    echo: str = ""
    drops_output: bool = False

    def as_arguments(self) -> tuple[TokenizedPrompt, SamplingParams, str, int]:
        """Gives the arguments of AsyncLLM.stream."""
        return self.prompt, self.params, self.request_id, self.priority

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)


async def prepare_chat(llm: AsyncLLM, body: ChatRequest) -> PreparedRequest:
    """Renders and tokenizes a chat.

    Raises:
        InputError: the request cannot be answered as it is; ApiError names the field where one is at fault.
    """
    check_extra_fields(body.model_extra)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(f"top_logprobs={body.top_logprobs} needs logprobs=true", param="top_logprobs")
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise ApiError("a chat needs a tokenizer, and this server has none: send token ids to /v1/completions")
    variables = body.chat_template_kwargs or {}
    if clash := variables.keys() & _NOT_TEMPLATE_VARIABLES:
        raise ApiError(f"{min(clash)!r} is not a variable of the chat template", param="chat_template_kwargs")
    try:
        text = tokenizer.render_chat(
            body.messages,
            body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            **variables,
        )
    except InputError as error:
        raise ApiError(str(error), param="messages") from None
    prompt = await _encode(tokenizer, text, bool(body.add_special_tokens), param="messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked_as = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return _checked(llm, body, prompt, _request_id("chatcmpl"), asked, asked_as, default=None)


async def prepare_completions(llm: AsyncLLM, body: CompletionRequest) -> list[PreparedRequest]:
    """Tokenizes the prompts of a completion, one request for each.

    Raises:
        InputError: the request cannot be answered as it is; ApiError names the field where one is at fault.
    """
    check_extra_fields(body.model_extra)
    tokenizer = llm.get_tokenizer()
    add_special_tokens = body.add_special_tokens is not False
    base, prepared = _request_id("cmpl"), []
    for index, prompt in enumerate(split_prompts(body.prompt)):
        if isinstance(prompt, list):
            tokenized = TokenizedPrompt(prompt)
        elif tokenizer is None:
            raise ApiError("a text prompt needs a tokenizer, and this server has none: send token ids", param="prompt")
        else:
            tokenized = await _encode(tokenizer, prompt, add_special_tokens, param="prompt")
        request_id = f"{base}-{index}"
        prepared.append(
            _checked(llm, body, tokenized, request_id, body.max_tokens, "max_tokens", default=COMPLETION_MAX_TOKENS)
        )
    return prepared


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


def _request_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


async def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool, param: str) -> TokenizedPrompt:
    try:
        if len(text) < _LONG_TEXT:
            return TokenizedPrompt(tokenizer.encode(text, add_special_tokens), text)
        return TokenizedPrompt(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens), text)
    except InputError as error:
        raise ApiError(str(error), param=param) from None


def _checked(
    llm: AsyncLLM,
    body: GenerationRequest,
    prompt: TokenizedPrompt,
    request_id: str,
    asked: int | None,
    asked_as: str,
    default: int | None,
) -> PreparedRequest:
    limit, num_prompt = llm.limits.max_model_len, len(prompt.token_ids)
    check_length(num_prompt, asked, asked_as, limit)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs are not told in a stream: leave out stream", param="prompt_logprobs")
    is_echo = isinstance(body, CompletionRequest) and body.echo
    drops_output = is_echo and asked == 0
    defaults = dict(llm.sampling_defaults)
    of_model = defaults.pop("max_tokens", None)
    if asked is None:
        asked = default if of_model is None else min(of_model, limit - num_prompt)
    if asked == 0:
        asked = int(drops_output)
    params = _sampling_params(body, defaults, asked, is_echo, llm.get_tokenizer() is not None)
    params = llm.check_request(prompt, params)
    if body.cache_salt is not None:
        if not body.cache_salt:
            raise ApiError("cache_salt must be a non-empty string", param="cache_salt")
        prompt = dataclasses.replace(prompt, cache_salt=body.cache_salt)
    if body.priority and not llm.limits.has_priorities:
        raise ApiError(
            f"priority={body.priority} needs a server with --scheduling-policy priority; leave it at 0",
            param="priority",
        )
    echo = _prompt_text(prompt, llm.get_tokenizer()) if is_echo else ""
    return PreparedRequest(request_id, prompt, params, body.priority, echo, drops_output)


def _prompt_text(prompt: TokenizedPrompt, tokenizer: Tokenizer | None) -> str:
    if prompt.text is not None:
        return prompt.text
    if tokenizer is None:
        raise ApiError("echo needs a tokenizer, and this server has none: use return_token_ids", param="echo")
    return tokenizer.decode(prompt.token_ids)


def check_length(num_prompt: int, asked: int | None, asked_as: str, limit: int) -> None:
    """Refuses a request that the model's context cannot hold.

    Raises:
        ApiError: with the numbers.
    """
    context = f"This model's maximum context length is {limit} tokens"
    if num_prompt >= limit:
        raise ApiError(
            f"{context}, but the prompt has {num_prompt}, which leaves no room for output. Please shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    if asked is not None and num_prompt + asked > limit:
        raise ApiError(
            f"{context}. However, you requested {num_prompt + asked} tokens ({num_prompt} in the prompt, {asked} in "
            f"the output). Please shorten the prompt or lower {asked_as} to {limit - num_prompt} or less.",
            param=asked_as,
            code="context_length_exceeded",
        )


def _sampling_params(
    body: GenerationRequest, defaults: Mapping[str, Any], max_tokens: int | None, is_echo: bool, detokenize: bool
) -> SamplingParams:
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if is_echo and body.prompt_logprobs is None:
        given["prompt_logprobs"] = body.num_logprobs
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=body.num_logprobs,
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        detokenize=detokenize,
        extra_args=body.vllm_xargs,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        **{**defaults, **given},
    )


_SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs", "logprob_token_ids"),
)
