"""Puts the app together: layers, routes, what runs beside them. Each group of routes stands in a file of its own."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.middleware.cors import CORSMiddleware

from jaxllm import __version__
from jaxllm.api.engine_client import EngineClient
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.access import AccessControl
from jaxllm.server.admin import ADMIN_PATHS, add_admin_routes
from jaxllm.server.chat import chat_answer, chat_events
from jaxllm.server.completions import completion_answer, completion_events
from jaxllm.server.connection import while_connected
from jaxllm.server.errors import ApiError, add_error_handlers, invalid_body
from jaxllm.server.peer_books import PeerBooks
from jaxllm.server.prepare import prepare_chat, prepare_completions
from jaxllm.server.probes import add_probe_routes
from jaxllm.server.protocol import ChatRequest, CompletionRequest
from jaxllm.server.render import add_render_routes
from jaxllm.server.request_ids import HEADER, RequestIds
from jaxllm.server.sse import EventStream
from jaxllm.server.state import Api, json_response
from jaxllm.server.stats_log import log_stats
from jaxllm.server.tokenize import add_tokenizer_routes
from jaxllm.server.tokens_in_out import add_token_routes


def build_app(
    llm: EngineClient,
    model: str,
    args: ServerArgs,
    *,
    log_stats_every: float | None = None,
    peers: PeerBooks | None = None,
) -> FastAPI:
    """Makes the app over a running engine; `log_stats_every` is in seconds, None for no log line.

    `peers` has the books of the other processes that answer HTTP.
    """
    api = Api(llm, model, args, peers)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        task = asyncio.create_task(log_stats(llm, log_stats_every)) if log_stats_every else None
        yield
        if task is not None:
            task.cancel()

    docs: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(
        title="jaxllm",
        version=__version__,
        root_path=args.root_path,
        lifespan=lifespan,
        **(docs if args.disable_fastapi_docs else {}),
    )
    app.state.api = api
    _add_layers(app, args)
    add_error_handlers(app)
    _add_generation_routes(app, api)
    _add_model_routes(app, api)
    add_probe_routes(app, api)
    add_tokenizer_routes(app, api)
    add_render_routes(app, api)
    add_token_routes(app, api)
    add_admin_routes(app, api)
    return app


def _add_layers(app: FastAPI, args: ServerArgs) -> None:
    """Adds what a request passes before its route; the last added is the first that it meets."""
    app.add_middleware(AccessControl, args.api_key, args.admin_api_key, ADMIN_PATHS)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        expose_headers=[HEADER, "Retry-After"],
    )
    app.add_middleware(RequestIds, args.enable_request_id_headers)


def _add_generation_routes(app: FastAPI, api: Api) -> None:
    @app.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        api.check(body.model)
        api.with_flags(body)
        request = await prepare_chat(api.llm, body, api.terms(http, body.request_id, body.timeout))
        api.check_room()
        head, usage = api.head(request.answer_id), api.usage(request.num_prompt_tokens)
        rest = (api.generator, request, body, head, usage, api.args.response_role, api.logprob_style(body))
        if body.stream:
            return EventStream(chat_events(*rest))
        return await while_connected(http, lambda: chat_answer(*rest))

    @app.post("/v1/completions")
    async def create_completion(body: CompletionRequest, http: Request) -> Response:
        api.check(body.model)
        api.with_flags(body)
        requests = await prepare_completions(api.llm, body, api.terms(http, body.request_id, body.timeout))
        api.check_room()
        head = api.head(requests[0].answer_id)
        usage = api.usage(sum(each.num_prompt_tokens for each in requests))
        rest = (api.generator, requests, body, head, usage, api.logprob_style(body))
        if body.stream:
            return EventStream(completion_events(*rest))
        return await while_connected(http, lambda: completion_answer(*rest))

    @app.post("/invocations")
    async def invoke(body: dict[str, Any], http: Request) -> Response:
        """Answers a chat or a completion, whichever the body is, as SageMaker's hosts expect."""
        try:
            if "messages" in body:
                return await create_chat_completion(ChatRequest.model_validate(body), http)
            if "prompt" in body:
                return await create_completion(CompletionRequest.model_validate(body), http)
        except ValidationError as error:
            raise invalid_body(error.errors()) from None
        raise ApiError("the body must have messages or prompt")


def _add_model_routes(app: FastAPI, api: Api) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [api.card(name) for name in api.names]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        if name not in api.names:
            raise api.unknown_model(name)
        return json_response(api.card(name))
