"""POST /v1/chat/completions/render and /v1/completions/render: what would be generated from, and how. Runs no engine.

What they answer can be sent to /inference/v1/generate, of this server or another one with the same model.
"""

from fastapi import FastAPI, Request, Response

from jaxllm.server.answers import Json
from jaxllm.server.in_flight import told_params
from jaxllm.server.prepare import PreparedRequest, prepare_chat, prepare_completions
from jaxllm.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jaxllm.server.state import Api, json_response


def add_render_routes(app: FastAPI, api: Api) -> None:
    """Adds both routes; a chat gives one body for the route that generates, a completion one for each prompt."""

    @app.post("/v1/chat/completions/render")
    async def render_chat_completion(body: ChatRequest, http: Request) -> Response:
        api.check(body.model)
        request = await prepare_chat(api.llm, body, api.terms(http, body.request_id, body.timeout))
        return json_response(_rendered(request, body))

    @app.post("/v1/completions/render")
    async def render_completion(body: CompletionRequest, http: Request) -> Response:
        api.check(body.model)
        requests = await prepare_completions(api.llm, body, api.terms(http, body.request_id, body.timeout))
        return json_response([_rendered(request, body) for request in requests])


def _rendered(request: PreparedRequest, body: GenerationRequest) -> Json:
    params = {**told_params(request.params), "max_tokens": request.params.max_tokens}
    rendered: Json = {
        "request_id": request.request_id,
        "token_ids": request.prompt.token_ids,
        "sampling_params": params,
        "model": body.model,
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt,
        "priority": body.priority,
    }
    if body.stream_options is not None:
        rendered["stream_options"] = body.stream_options.model_dump(exclude_none=True)
    return rendered
