"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer for whoever has none. Runs no engine."""

from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, SkipValidation

from jaxllm.server.answers import Json
from jaxllm.server.errors import ApiError, invalid_value
from jaxllm.server.prompts import encode, render, tokenizer_for_chats
from jaxllm.server.protocol import ChatTemplateFields
from jaxllm.server.refused_fields import check_extra_fields
from jaxllm.server.state import Api, json_response
from jaxllm.text.tokenizer import Tokenizer


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt or messages."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    def as_chat(self) -> ChatTemplateFields:
        return ChatTemplateFields.model_validate(self.model_dump(include=set(ChatTemplateFields.model_fields)))


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(protected_namespaces=())

    model: str | None = None
    # Checked by hand: pydantic would look at each of 100,000 tokens on its own.
    tokens: Annotated[list[int], SkipValidation]


def add_tokenizer_routes(app: FastAPI, api: Api) -> None:
    """Adds the routes; /tokenizer_info only where its flag is set."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        api.check(body.model)
        check_extra_fields(body.model_extra)
        tokenizer = _tokenizer(api)
        ids = await _token_ids(api, body, http)
        answer: Json = {"count": len(ids), "max_model_len": api.llm.limits.max_model_len, "tokens": ids}
        answer["token_strs"] = [tokenizer.id_to_token(each) for each in ids] if body.return_token_strs else None
        return json_response(answer)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        api.check(body.model)
        ids = body.tokens
        if not isinstance(ids, list) or not all(type(each) is int and 0 <= each < 2**32 for each in ids):
            raise invalid_value("tokens", "a list of token ids", ids)
        return json_response({"prompt": _tokenizer(api).decode(ids, skip_special_tokens=False)})

    if api.args.enable_tokenizer_info_endpoint:

        @app.get("/tokenizer_info")
        async def tokenizer_info() -> Response:
            tokenizer = _tokenizer(api)
            return json_response(
                {
                    **tokenizer.special_tokens,
                    "eos_token": tokenizer.eos_token,
                    "eos_token_ids": list(tokenizer.eos_token_ids),
                    "vocab_size": tokenizer.vocab_size,
                    "chat_template": tokenizer.chat_template,
                    "model_max_length": api.llm.limits.max_model_len,
                }
            )


async def _token_ids(api: Api, body: TokenizeRequest, http: Request) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return (await encode(_tokenizer(api), body.prompt, body.add_special_tokens is not False, "prompt")).token_ids
    tokenizer = tokenizer_for_chats(api.llm)
    text = render(tokenizer, body.as_chat(), api.terms(http))
    return (await encode(tokenizer, text, bool(body.add_special_tokens), "messages")).token_ids


def _tokenizer(api: Api) -> Tokenizer:
    tokenizer = api.llm.get_tokenizer()
    if tokenizer is None:
        raise ApiError("this server has no tokenizer: it was started with --skip-tokenizer-init")
    return tokenizer
