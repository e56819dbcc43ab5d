"""Routes for whoever runs the server: pause, caches, profile, log level. Their keys are checked in access.py."""

import logging
from typing import Any, Literal

from fastapi import FastAPI, Response
from pydantic import BaseModel

from jaxllm import __version__
from jaxllm.api.engine_client import PauseMode
from jaxllm.server.errors import ApiError
from jaxllm.server.state import Api, json_response

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
# SGLang's ways to pause -> ours, and whether the KV of what stands still is given up.
_SGLANG_MODES: dict[str, tuple[PauseMode, bool]] = {
    "abort": ("abort", True),
    "retract": ("keep", True),
    "in_place": ("keep", False),
}
ADMIN_PATHS = frozenset(
    (
        *("/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache", "/server_info", "/log_level"),
        *("/start_profile", "/stop_profile", "/weight_info", "/update_weight_version"),
        *("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache", "/get_server_info"),
        "/get_weight_version",
    )
)


class AbortBody(BaseModel):
    """Which requests to end; none means all."""

    request_ids: list[str] | None = None


class SglangAbortBody(BaseModel):
    """The same in SGLang's words."""

    rid: str | list[str] | None = None
    abort_all: bool = False


class SglangPauseBody(BaseModel):
    """How to pause in SGLang's words."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class LevelBody(BaseModel):
    """POST /log_level; without a logger all of the program's."""

    level: str
    logger: str | None = None


class VersionBody(BaseModel):
    """POST /update_weight_version."""

    new_version: str | int


def add_admin_routes(app: FastAPI, api: Api) -> None:
    """Adds all routes of ADMIN_PATHS."""
    _add_pause_routes(app, api)
    _add_abort_routes(app, api)
    _add_cache_routes(app, api)
    _add_profile_routes(app, api)
    _add_log_level_routes(app)
    _add_information_routes(app, api)


def _add_pause_routes(app: FastAPI, api: Api) -> None:
    async def pause(mode: PauseMode, clear_cache: bool) -> Response:
        await api.llm.pause_generation(mode, clear_cache)
        return json_response({"status": "paused"})

    @app.post("/pause")
    async def pause_generation(mode: PauseMode = "abort", clear_cache: bool = True) -> Response:
        return await pause(mode, clear_cache)

    @app.post("/pause_generation")
    async def pause_as_sglang(body: SglangPauseBody | None = None) -> Response:
        return await pause(*_SGLANG_MODES[(body or SglangPauseBody()).mode])

    @app.post("/resume")
    @app.post("/continue_generation")
    async def resume() -> Response:
        await api.llm.resume_generation()
        return json_response({"status": "resumed"})

    @app.get("/is_paused")
    async def is_paused() -> Response:
        return json_response({"is_paused": await api.llm.is_paused()})


def _add_abort_routes(app: FastAPI, api: Api) -> None:
    async def abort(names: list[str] | None) -> Response:
        if names is None:
            return json_response({"status": "aborted", "aborted": await api.llm.abort_all()})
        ids = [each for name in names for each in api.in_flight.called(name)]
        for each in ids:
            await api.llm.abort(each)
        return json_response({"status": "aborted", "aborted": len(ids)})

    @app.post("/abort_requests")
    async def abort_requests(body: AbortBody | None = None) -> Response:
        return await abort((body and body.request_ids) or None)

    @app.post("/abort_request")
    async def abort_as_sglang(body: SglangAbortBody) -> Response:
        if body.abort_all:
            return await abort(None)
        if not body.rid:
            raise ApiError("name a request in rid, or set abort_all", param="rid")
        return await abort([body.rid] if isinstance(body.rid, str) else body.rid)


def _add_cache_routes(app: FastAPI, api: Api) -> None:
    @app.post("/reset_prefix_cache")
    @app.post("/flush_cache")
    async def reset_prefix_cache() -> Response:
        if not await api.llm.reset_prefix_cache():
            raise ApiError(
                "requests hold blocks of the cache: let them end, or abort them, first", status=409, code="cache_in_use"
            )
        return json_response({"success": True})


def _add_profile_routes(app: FastAPI, api: Api) -> None:
    @app.post("/start_profile")
    async def start_profile() -> Response:
        if api.args.profile_directory is None:
            raise ApiError("profiling needs a server with --profiler-config '{\"directory\": DIR}'")
        await api.llm.start_profile(api.args.profile_directory)
        return json_response({"status": "profiling", "directory": api.args.profile_directory})

    @app.post("/stop_profile")
    async def stop_profile() -> Response:
        await api.llm.stop_profile()
        return json_response({"status": "stopped"})


def _add_log_level_routes(app: FastAPI) -> None:
    @app.get("/log_level")
    async def log_level() -> Response:
        return json_response({"level": logging.getLevelName(logging.getLogger().level).lower()})

    @app.post("/log_level")
    async def set_log_level(body: LevelBody) -> Response:
        level = body.level.lower()
        if level not in LOG_LEVELS:
            raise ApiError(
                f"level={body.level!r:.40} is not known; choose one of {', '.join(LOG_LEVELS)}", param="level"
            )
        logging.getLogger(body.logger).setLevel(level.upper())
        return json_response({"level": level})


def _add_information_routes(app: FastAPI, api: Api) -> None:
    @app.get("/server_info")
    @app.get("/get_server_info")
    async def server_info() -> Response:
        limits, stats = api.llm.limits, api.llm.stats
        told: dict[str, Any] = {
            "version": __version__,
            "model": api.model,
            "served_model_name": list(api.names),
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_running,
            "vocab_size": limits.vocab_size,
            "num_running": stats.running,
            "num_waiting": stats.waiting,
            "kv_cache_usage": stats.kv_usage,
        }
        return json_response(told)

    @app.get("/weight_info")
    @app.get("/get_weight_version")
    async def weight_info() -> Response:
        return json_response({"weight_version": await api.llm.get_weight_version()})

    @app.post("/update_weight_version")
    async def update_weight_version(body: VersionBody) -> Response:
        await api.llm.update_weight_version(body.new_version)
        return json_response({"success": True, "new_version": body.new_version})
