"""The routes: HTTP in, answers out. Knows what each route is for; how it is answered stands in the files beside."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware

from jaxllm import __version__
from jaxllm.api.engine_client import EngineClient
from jaxllm.api.errors import EngineDeadError
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.answers import AnswerHead, Json, Usage, model_card
from jaxllm.server.chat import chat_answer, chat_events
from jaxllm.server.completions import completion_answer, completion_events
from jaxllm.server.errors import ApiError, add_error_handlers, error_response
from jaxllm.server.generation import Generator
from jaxllm.server.logprobs import LogprobStyle
from jaxllm.server.metrics import make_registry
from jaxllm.server.peer_books import PeerBooks
from jaxllm.server.prepare import prepare_chat, prepare_completions
from jaxllm.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jaxllm.server.sse import EventStream
from jaxllm.server.stats_log import log_stats

_CLIENT_LEFT = 499  # nobody reads it; nginx's name for what happened


class Api:
    """What all routes of one app share: the engine, its names and its books."""

    def __init__(self, llm: EngineClient, model: str, args: ServerArgs, peers: PeerBooks | None = None):
        self.llm = llm
        self.model = model
        self.args = args
        self.names = args.model_names(model)
        self.started = int(time.time())
        add_others = list if peers is None else peers.add
        read = llm.books.read
        self.registry = make_registry(lambda: add_others(read(self.names[0], llm.stats)), args.metrics_prefix)
        self.generator = Generator(llm)

    def check(self, body: GenerationRequest) -> None:
        """Refuses a model that is not served here, and everything once the engine is dead."""
        if body.model is not None and body.model not in self.names:
            raise self.unknown_model(body.model)
        self.llm.check_health()

    def unknown_model(self, name: str) -> ApiError:
        served = ", ".join(repr(each) for each in self.names)
        message = f"The model {name!r} does not exist; this server has {served}"
        return ApiError(message, status=404, param="model", code="model_not_found")

    def head(self, request_id: str) -> AnswerHead:
        return AnswerHead(request_id, self.names[0])

    def usage(self, num_prompt_tokens: int) -> Usage:
        return Usage(num_prompt_tokens, num_cached_tokens=0 if self.args.enable_prompt_tokens_details else None)

    def logprob_style(self, body: GenerationRequest) -> LogprobStyle | None:
        """Says how a request wants log-probabilities told; None if it wants none."""
        if body.num_logprobs is None:
            return None
        named = frozenset(body.logprob_token_ids or ())
        return LogprobStyle(
            body.num_logprobs, named, bool(body.return_tokens_as_token_ids), tokenizer=self.llm.get_tokenizer()
        )

    def card(self, name: str) -> Json:
        return model_card(name, self.model, self.started, self.llm.limits.max_model_len)


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
    app.add_middleware(
        CORSMiddleware,
        allow_origins=args.allowed_origins,
        allow_methods=args.allowed_methods,
        allow_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
    )
    add_error_handlers(app)
    _add_generation_routes(app, api)
    _add_model_routes(app, api)
    _add_probe_routes(app, api)
    return app


def _add_generation_routes(app: FastAPI, api: Api) -> None:
    @app.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, http: Request) -> Response:
        api.check(body)
        request = await prepare_chat(api.llm, body)
        head, usage = api.head(request.request_id), api.usage(request.num_prompt_tokens)
        rest = (api.generator, request, body, head, usage, api.args.response_role, api.logprob_style(body))
        if body.stream:
            return EventStream(chat_events(*rest))
        return await _while_connected(http, lambda: chat_answer(*rest))

    @app.post("/v1/completions")
    async def create_completion(body: CompletionRequest, http: Request) -> Response:
        api.check(body)
        requests = await prepare_completions(api.llm, body)
        head = api.head(requests[0].request_id.rpartition("-")[0])
        usage = api.usage(sum(each.num_prompt_tokens for each in requests))
        rest = (api.generator, requests, body, head, usage, api.logprob_style(body))
        if body.stream:
            return EventStream(completion_events(*rest))
        return await _while_connected(http, lambda: completion_answer(*rest))


def _add_model_routes(app: FastAPI, api: Api) -> None:
    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json({"object": "list", "data": [api.card(name) for name in api.names]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        if name not in api.names:
            raise api.unknown_model(name)
        return _json(api.card(name))


def _add_probe_routes(app: FastAPI, api: Api) -> None:
    @app.get("/health")
    async def health() -> Response:
        try:
            api.llm.check_health()
        except EngineDeadError as error:
            return error_response(error)
        return Response()

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        return await health()

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(api.registry), media_type=CONTENT_TYPE_LATEST)


async def _while_connected(http: Request, answer: Callable[[], Awaitable[Json]]) -> Response:
    """Answers in one piece; a client that leaves cancels the work."""
    work = asyncio.ensure_future(answer())
    left = asyncio.create_task(_client_left(http))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        return _json(work.result()) if work.done() else Response(status_code=_CLIENT_LEFT)
    finally:
        left.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def _client_left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _json(data: Json) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
