"""What all routes of one app share: the engine, its names, its books. Knows no route."""

import asyncio
import time

import msgspec
from fastapi import Request, Response

from jaxllm.api.engine_client import EngineClient
from jaxllm.api.errors import EngineDeadError
from jaxllm.config.server_args import ServerArgs
from jaxllm.server.answers import AnswerHead, Json, Usage, model_card
from jaxllm.server.crash_dump import CrashDumps
from jaxllm.server.errors import ApiError
from jaxllm.server.generation import Generator
from jaxllm.server.in_flight import InFlight
from jaxllm.server.logprobs import LogprobStyle
from jaxllm.server.metrics import make_registry
from jaxllm.server.peer_books import PeerBooks
from jaxllm.server.protocol import GenerationRequest, StreamOptions
from jaxllm.server.request_ids import is_request_id
from jaxllm.server.request_log import RequestLog
from jaxllm.server.terms import Terms

_LONGEST_QUESTION = 1.0  # seconds; a step may take longer, and a probe does not wait that long
TIMEOUT_HEADER = "X-Request-Timeout"


class Api:
    """What all routes of one app share."""

    def __init__(self, llm: EngineClient, model: str, args: ServerArgs, peers: PeerBooks | None = None):
        self.llm = llm
        self.model = model
        self.args = args
        self.names = args.model_names(model)
        self.started = int(time.time())
        add_others = list if peers is None else peers.add
        read = llm.books.read
        self.registry = make_registry(lambda: add_others(read(self.names[0], llm.stats)), args.metrics_prefix)
        self.in_flight = InFlight(args.max_queued_requests, llm.limits.max_running, keeps_tokens=args.crash_dump_text)
        self.dumps = CrashDumps(args.crash_dump_dir, self.in_flight)
        log = RequestLog(args.enable_log_requests, args.enable_log_outputs, args.max_log_len)
        self.generator = Generator(llm, self.in_flight, self.dumps, log)

    def check(self, model: str | None) -> None:
        """Refuses a model that is not served here, and everything once the engine is dead."""
        if model is not None and model not in self.names:
            raise self.unknown_model(model)
        self.check_health()

    def check_room(self) -> None:
        """Refuses a request for which the queue is too long."""
        self.in_flight.check_room(self.llm.stats.waiting)

    def check_health(self) -> None:
        """Raises EngineDeadError when the engine is dead or hangs; the first time, a crash dump is written."""
        try:
            self.llm.check_health()
        except EngineDeadError as error:
            self.dumps.write(error)
            raise

    async def is_paused(self) -> bool:
        """Says whether generation is paused; an engine that is too busy to say is not."""
        try:
            return await asyncio.wait_for(self.llm.is_paused(), _LONGEST_QUESTION)
        except TimeoutError:
            return False

    def unknown_model(self, name: str) -> ApiError:
        served = ", ".join(repr(each) for each in self.names)
        message = f"The model {name!r} does not exist; this server has {served}"
        return ApiError(message, status=404, param="model", code="model_not_found")

    def terms(self, http: Request, request_id: str | None = None, timeout: float | None = None) -> Terms:
        """Gives what headers and flags say besides a body; `request_id` and `timeout` are those of the body.

        Raises:
            ApiError: a name or time that cannot be.
        """
        if request_id is not None and not is_request_id(request_id):
            raise ApiError("request_id must have 1 to 256 printable ASCII characters", param="request_id")
        seconds = [_seconds("timeout", timeout), _seconds(TIMEOUT_HEADER, http.headers.get(TIMEOUT_HEADER))]
        limits = [limit for limit in (*seconds, self.args.request_timeout) if limit is not None]
        return Terms(
            getattr(http.state, "request_id", None) or request_id or getattr(http.state, "new_request_id", None),
            time.monotonic() + min(limits) if limits else None,
            self.args.default_chat_template_kwargs or {},
            self.args.trust_request_chat_template,
        )

    def head(self, answer_id: str) -> AnswerHead:
        return AnswerHead(answer_id, self.names[0])

    def usage(self, num_prompt_tokens: int) -> Usage:
        return Usage(num_prompt_tokens, num_cached_tokens=0 if self.args.enable_prompt_tokens_details else None)

    def with_flags(self, body: GenerationRequest) -> None:
        """Fills in what the server's flags say for a body that does not."""
        if body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = self.args.return_tokens_as_token_ids
        if body.stream and self.args.enable_force_include_usage:
            body.stream_options = (body.stream_options or StreamOptions()).model_copy(update={"include_usage": True})

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


def json_response(data: Json | list[Json]) -> Response:
    """Answers with JSON."""
    return Response(msgspec.json.encode(data), media_type="application/json")


def _seconds(name: str, given: float | str | None) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ApiError(f"{name} must be a number of seconds above 0, got {given!r:.40}", param=name)
    return seconds
