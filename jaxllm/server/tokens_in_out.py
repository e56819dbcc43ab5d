"""POST /inference/v1/generate: token ids in, token ids out, with SamplingParams by their own names. Knows no text."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, SkipValidation

from jaxllm.api.prompts import TokenizedPrompt
from jaxllm.config.sampling_params import SamplingParams
from jaxllm.server.answers import Json, Usage
from jaxllm.server.connection import while_connected
from jaxllm.server.errors import ApiError, invalid_value
from jaxllm.server.generation import Answers, Generator
from jaxllm.server.in_flight import CLIENT_FIELDS
from jaxllm.server.logprobs import LogprobStyle, chat_logprobs, prompt_logprobs_json
from jaxllm.server.prepare import PreparedRequest, check_length, check_priority, salted
from jaxllm.server.protocol import StreamOptions
from jaxllm.server.refused_fields import check_extra_fields
from jaxllm.server.sse import EventStream, event
from jaxllm.server.state import Api
from jaxllm.server.terms import Terms


class GenerateRequest(BaseModel):
    """POST /inference/v1/generate; what the render routes answer."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    # Checked by hand: pydantic would look at each of 100,000 tokens on its own.
    token_ids: Annotated[list[int], SkipValidation]
    sampling_params: dict[str, Any]
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    timeout: float | None = None  # seconds
    return_tokens_as_token_ids: bool | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def add_token_routes(app: FastAPI, api: Api) -> None:
    """Adds the route."""

    @app.post("/inference/v1/generate")
    async def generate(body: GenerateRequest, http: Request) -> Response:
        api.check(body.model)
        request = prepare_tokens(api, body, api.terms(http, body.request_id, body.timeout))
        api.check_room()
        usage = api.usage(request.num_prompt_tokens)
        style = logprob_style(api, body, request.params)
        if body.stream:
            wants_usage = body.wants_usage or api.args.enable_force_include_usage
            return EventStream(token_events(api.generator, request, usage, style, wants_usage))
        return await while_connected(http, lambda: token_answer(api.generator, request, usage, style))


def prepare_tokens(api: Api, body: GenerateRequest, terms: Terms) -> PreparedRequest:
    """Checks the token ids and makes SamplingParams of the fields.

    Raises:
        InputError: the request cannot be answered as it is.
    """
    check_extra_fields(body.model_extra)
    ids = body.token_ids
    if not isinstance(ids, list) or not all(type(each) is int for each in ids):
        raise invalid_value("token_ids", "a list of token ids", ids)
    if unknown := body.sampling_params.keys() - CLIENT_FIELDS:
        raise ApiError(f"sampling_params has no field {min(unknown)!r:.80}", param="sampling_params")
    if body.stream and body.sampling_params.get("prompt_logprobs") is not None:
        raise ApiError("prompt_logprobs are not told in a stream: leave out stream", param="sampling_params")
    needs_text = bool(body.sampling_params.get("stop")) and api.llm.get_tokenizer() is not None
    try:
        params = SamplingParams(**body.sampling_params, detokenize=needs_text)
    except TypeError as error:  # of what is no number, where one is compared
        raise ApiError(f"sampling_params: {error}", param="sampling_params") from None
    check_length(len(ids), params.max_tokens, "sampling_params.max_tokens", api.llm.limits.max_model_len)
    prompt = TokenizedPrompt(ids)
    params = api.llm.check_request(prompt, params)
    check_priority(api.llm, body.priority)
    answer_id, request_id = terms.ids("" if terms.request_id else "gen-")
    prompt = salted(prompt, body.cache_salt)
    return PreparedRequest(request_id, prompt, params, body.priority, answer_id=answer_id, deadline=terms.deadline)


def logprob_style(api: Api, body: GenerateRequest, params: SamplingParams) -> LogprobStyle | None:
    """Says how log-probabilities are told; None where none are."""
    if params.logprobs is None and not params.logprob_token_ids:
        return None
    as_ids = body.return_tokens_as_token_ids
    as_ids = api.args.return_tokens_as_token_ids if as_ids is None else as_ids
    named = frozenset(params.logprob_token_ids or ())
    return LogprobStyle(params.logprobs or 0, named, as_ids, tokenizer=api.llm.get_tokenizer())


async def token_answer(
    generator: Generator, request: PreparedRequest, usage: Usage, style: LogprobStyle | None
) -> Json:
    """Gives the whole answer."""
    (answers,) = await generator.run([request])
    _count(answers, usage)
    choices = [
        _choice(index, sample.token_ids, sample.logprobs, style, sample.finish_reason, sample.stop_reason)
        for index, sample in enumerate(answers.samples)
    ]
    scored = answers.prompt_logprobs
    told = None if scored is None else prompt_logprobs_json(scored)
    return {"request_id": request.answer_id, "choices": choices, "prompt_logprobs": told, "usage": usage.shape()}


async def token_events(
    generator: Generator,
    request: PreparedRequest,
    usage: Usage,
    style: LogprobStyle | None,
    wants_usage: bool,
) -> AsyncGenerator[bytes]:
    """Yields the answer as it comes."""
    head = {"request_id": request.answer_id}
    async with aclosing(generator.stream(request)) as deltas:
        async for delta in deltas:
            usage.num_output_tokens += len(delta.token_ids)
            if usage.num_cached_tokens is not None and delta.index == 0:
                usage.num_cached_tokens = delta.num_cached_tokens
            shaped = _choice(
                *(delta.index, delta.token_ids, delta.logprobs or (), style, delta.finish_reason, delta.stop_reason)
            )
            yield event({**head, "choices": [shaped]})
    if wants_usage:
        yield event({**head, "choices": [], "usage": usage.shape()})


def _choice(
    index: int,
    token_ids: Sequence[int],
    logprobs: Sequence[Any],
    style: LogprobStyle | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> Json:
    scored = chat_logprobs(token_ids, logprobs, style) if style is not None and token_ids else None
    return {
        "index": index,
        "token_ids": token_ids,
        "logprobs": scored,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }


def _count(answers: Answers, usage: Usage) -> None:
    usage.num_output_tokens = sum(len(sample.token_ids) for sample in answers.samples)
    if usage.num_cached_tokens is not None:
        usage.num_cached_tokens = answers.num_cached_tokens
