"""What watches a server asks: whether it lives, whether it is ready, what it does. Generates nothing."""

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from jaxllm import __version__
from jaxllm.api.errors import EngineDeadError
from jaxllm.server.errors import ApiError, error_response
from jaxllm.server.state import Api, json_response


def add_probe_routes(app: FastAPI, api: Api) -> None:
    """Adds the routes: /live says 200 as long as the process answers, /health as long as the engine works.

    /ready besides says 503 while generation is paused or the queue is full: another copy should be asked then.
    """

    @app.get("/health")
    async def health() -> Response:
        try:
            api.check_health()
        except EngineDeadError as error:
            return error_response(error)
        return Response()

    @app.get("/ping")
    @app.post("/ping")
    async def ping() -> Response:
        return await health()

    @app.get("/live")
    async def live() -> Response:
        return Response()

    @app.get("/ready")
    async def ready() -> Response:
        try:
            api.check_health()
            if await api.is_paused():
                raise ApiError("generation is paused", status=503, code="paused")
            api.check_room()
        except (EngineDeadError, ApiError) as error:
            refusal = ApiError(str(error), status=503, code=error.code) if isinstance(error, ApiError) else error
            return error_response(refusal)
        return Response()

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/load")
    async def load() -> Response:
        stats = api.llm.stats
        return json_response(
            {"server_load": len(api.in_flight), "num_running": stats.running, "num_waiting": stats.waiting}
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(api.registry), media_type=CONTENT_TYPE_LATEST)
