"""What can go wrong with an HTTP request -> OpenAI's error body. One line per error; no traceback ever leaves."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from jaxllm.api.errors import EngineDeadError, RequestError
from jaxllm.config.errors import InputError
from jaxllm.server.refused_routes import missing_route

logger = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(InputError):
    """A request that is refused, with its HTTP status; `param` names the field at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def as_api_error(error: Exception) -> ApiError:
    """Gives any exception its status and its line."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(str(error), status=503, code="engine_dead")
    if isinstance(error, RequestError):
        return ApiError(str(error), status=500, code="engine_error")
    logger.error("a request failed unexpectedly", exc_info=error)
    return ApiError(f"internal error: {type(error).__name__}; the server's log has more", status=500)


def error_body(error: Exception) -> dict[str, Any]:
    """Shapes an error as OpenAI does."""
    error = as_api_error(error)
    kind = _TYPES.get(error.status, "invalid_request_error")
    message = " ".join(str(error).split())
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: Exception) -> Response:
    """Answers with an error."""
    error = as_api_error(error)
    body = msgspec.json.encode(error_body(error))
    return Response(body, status_code=error.status, media_type="application/json", headers=error.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Makes every failure of a route an answer in OpenAI's shape."""

    async def on_failure(request: Request, error: Exception) -> Response:
        return error_response(error)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(invalid_body(error.errors()))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_http_error(request, error))
        response.headers.update(error.headers or {})
        return response

    for kind in (InputError, EngineDeadError, RequestError, Exception):
        app.add_exception_handler(kind, on_failure)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def invalid_body(problems: Sequence[Any]) -> ApiError:
    """Condenses what pydantic found to one line about the first field."""
    place = [str(part) for part in problems[0]["loc"] if part not in ("body", "query")]
    kind, message = problems[0]["type"], problems[0]["msg"]
    if kind == "json_invalid":
        return ApiError(
            f"the body is not valid JSON: {problems[0].get('ctx', {}).get('error', message)} (at {place[0]})"
        )
    if not place:
        return ApiError("the body must be a JSON object, sent with the header Content-Type: application/json")
    field = place[0]
    if kind == "missing" and len(place) == 1:
        return ApiError(f"the field {field!r} is missing", param=field)
    # A field with several types has a problem for each of them; only what they want is worth telling.
    wanted = dict.fromkeys(problem["msg"] for problem in problems if problem["loc"][:2] == problems[0]["loc"][:2])
    return ApiError(f"{field}: {' or '.join(wanted)}, got {problems[0]['input']!r:.60}", param=field)


def invalid_value(field: str, wanted: str, got: object) -> ApiError:
    """Says of a field that was checked by hand what it should be."""
    return ApiError(f"{field} must be {wanted}, got {got!r:.60}", param=field)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    path = request.url.path
    if error.status_code == 404:
        return ApiError(missing_route(path), status=404, code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return ApiError(f"{path} takes {allowed}, not {request.method}", status=405, code="method_not_allowed")
    return ApiError(str(error.detail), status=error.status_code)
