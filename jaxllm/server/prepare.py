"""A request's body -> prompts as token ids and SamplingParams, checked before anything runs. Runs nothing itself."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.api.engine_client import EngineClient
from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.config.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.server.errors import ApiError
from jaxllm.server.prompts import encode, render, split_prompts, tokenized_prompt, tokenizer_for_chats
from jaxllm.server.protocol import ChatRequest, CompletionRequest
from jaxllm.server.refused_fields import check_extra_fields
from jaxllm.server.terms import NO_TERMS, Terms
from jaxllm.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One prompt to run: what EngineClient.stream takes, and the text that the answer begins with.

    `answer_id` is what the client knows it by, together with the other prompts of its body. The output of a request
    that wants none of it is dropped: the engine samples one token all the same.
    """

    request_id: str
    prompt: TokenizedPrompt
    params: SamplingParams
    priority: int = 0
    echo: str = ""
    drops_output: bool = False
    answer_id: str = ""
    deadline: float | None = None

    def as_arguments(self) -> tuple[TokenizedPrompt, SamplingParams, str, int]:
        """Gives the arguments of EngineClient.stream."""
        return self.prompt, self.params, self.request_id, self.priority

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)


async def prepare_chat(llm: EngineClient, body: ChatRequest, terms: Terms = NO_TERMS) -> PreparedRequest:
    """Renders and tokenizes a chat.

    Raises:
        InputError: the request cannot be answered as it is; ApiError names the field where one is at fault.
    """
    check_extra_fields(body.model_extra)
    _check_stream_options(body)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(f"top_logprobs={body.top_logprobs} needs logprobs=true", param="top_logprobs")
    tokenizer = tokenizer_for_chats(llm)
    text = render(tokenizer, body, terms)
    prompt = await encode(tokenizer, text, bool(body.add_special_tokens), param="messages")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    asked_as = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    ids = terms.ids("chatcmpl-")
    return _checked(llm, body, prompt, terms, ids, _Length(asked, asked_as, default=None))


async def prepare_completions(
    llm: EngineClient, body: CompletionRequest, terms: Terms = NO_TERMS
) -> list[PreparedRequest]:
    """Tokenizes the prompts of a completion, one request for each.

    Raises:
        InputError: the request cannot be answered as it is; ApiError names the field where one is at fault.
    """
    check_extra_fields(body.model_extra)
    _check_stream_options(body)
    tokenizer = llm.get_tokenizer()
    add_special_tokens = body.add_special_tokens is not False
    (answer_id, base), prepared = terms.ids("cmpl-"), []
    length = _Length(body.max_tokens, "max_tokens", default=COMPLETION_MAX_TOKENS)
    for index, prompt in enumerate(split_prompts(body.prompt)):
        tokenized = await tokenized_prompt(tokenizer, prompt, add_special_tokens)
        prepared.append(_checked(llm, body, tokenized, terms, (answer_id, f"{base}-{index}"), length))
    return prepared


def _check_stream_options(body: ChatRequest | CompletionRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream=true", param="stream_options")


@dataclass(frozen=True, slots=True)
class _Length:
    """How many tokens a request asks for, the field that says so, and how many it gets if none does."""

    asked: int | None
    asked_as: str
    default: int | None


def _checked(
    llm: EngineClient,
    body: ChatRequest | CompletionRequest,
    prompt: TokenizedPrompt,
    terms: Terms,
    ids: tuple[str, str],
    length: _Length,
) -> PreparedRequest:
    limit, asked = llm.limits.max_model_len, length.asked
    prompt = _truncated(prompt, body.truncate_prompt_tokens, limit - max(asked or 1, 1))
    num_prompt = len(prompt.token_ids)
    check_length(num_prompt, asked, length.asked_as, limit)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError("prompt_logprobs are not told in a stream: leave out stream", param="prompt_logprobs")
    is_echo = isinstance(body, CompletionRequest) and body.echo
    drops_output = is_echo and asked == 0
    defaults = dict(llm.sampling_defaults)
    of_model = defaults.pop("max_tokens", None)
    if asked is None:
        asked = length.default if of_model is None else min(of_model, limit - num_prompt)
    if asked == 0:
        asked = int(drops_output)
    params = _sampling_params(body, defaults, asked, is_echo, llm.get_tokenizer() is not None)
    params = llm.check_request(prompt, params)
    prompt = salted(prompt, body.cache_salt)
    check_priority(llm, body.priority)
    echo = _prompt_text(prompt, llm.get_tokenizer()) if is_echo else ""
    answer_id, request_id = ids
    return PreparedRequest(
        request_id, prompt, params, body.priority, echo, drops_output, answer_id=answer_id, deadline=terms.deadline
    )


def _truncated(prompt: TokenizedPrompt, keep: int | None, room: int) -> TokenizedPrompt:
    """Keeps the last tokens of a prompt; -1 keeps as many as there is room for."""
    if keep is None:
        return prompt
    if keep == 0 or keep < -1:
        raise ApiError(
            f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {keep}",
            param="truncate_prompt_tokens",
        )
    keep = max(room, 1) if keep == -1 else keep
    if len(prompt.token_ids) <= keep:
        return prompt
    return TokenizedPrompt(prompt.token_ids[-keep:])


def salted(prompt: TokenizedPrompt, cache_salt: str | None) -> TokenizedPrompt:
    """Gives the prompt its salt, if it has one.

    Raises:
        ApiError: the salt is empty.
    """
    if cache_salt is None:
        return prompt
    if not cache_salt:
        raise ApiError("cache_salt must be a non-empty string", param="cache_salt")
    return dataclasses.replace(prompt, cache_salt=cache_salt)


def check_priority(llm: EngineClient, priority: int) -> None:
    """Refuses a priority that would be ignored.

    Raises:
        ApiError: the scheduling policy looks at none, or it is too large a number.
    """
    if priority and not llm.limits.has_priorities:
        raise ApiError(
            f"priority={priority} needs a server with --scheduling-policy priority; leave it at 0", param="priority"
        )
    if not -(2**63) <= priority < 2**63:
        raise ApiError("priority must fit in 64 bits", param="priority")


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
    body: ChatRequest | CompletionRequest,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    is_echo: bool,
    detokenize: bool,
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
