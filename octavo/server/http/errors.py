"""The one place where an error becomes an HTTP status and OpenAI's error body.
Knows nothing of how errors arise."""

from collections.abc import Callable

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo import errors
from octavo.observe.journeys.journey import current

CODES: dict[type[errors.OctavoError], str | None] = {
    errors.InvalidRequest: "invalid_value",
    errors.ContextTooLong: "context_length_exceeded",
    errors.Unsupported: "unsupported_parameter",
    errors.Unauthorized: "invalid_api_key",
    errors.ModelNotFound: "model_not_found",
    errors.NotFound: "not_found",
    errors.RequestTimeout: "request_timeout",
    errors.TooLarge: "request_too_large",
    errors.Overloaded: "rate_limit_exceeded",
    errors.DeadlineExceeded: "deadline_exceeded",
    errors.RequestFailed: "request_failed",
    errors.EngineUnavailable: "engine_unavailable",
    errors.EngineDead: "engine_dead",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


ErrorShape = Callable[[int, ErrorDetail, str], msgspec.Struct]
"""(status, what happened, request id) → the body that another dialect's clients expect."""

ERROR_SHAPES: dict[str, ErrorShape] = {}
"""By path, which covers the paths below it. An endpoint whose dialect is not OpenAI's puts its own here."""


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def describe(error: Exception, request_id: str, route: str = "") -> tuple[int, ErrorBody]:
    """Status and body. What we did not foresee says nothing but the id under which the log explains it."""
    match error:
        case errors.ConfigError():
            pass  # a start-up mistake has no business here: fall through to 500
        case errors.OctavoError():
            code = CODES.get(type(error))
            return error.status, ErrorBody(ErrorDetail(error.message, error.type, error.param, code))
        case HTTPException(status_code=404):
            return 404, ErrorBody(ErrorDetail(f"no such route: {route[:200]}", "not_found_error", None, "not_found"))
        case HTTPException(status_code=405):
            message = f"this route does not take that method: {route[:200]}"
            return 405, ErrorBody(ErrorDetail(message, "invalid_request_error", None, "method_not_allowed"))
        case HTTPException(status_code=status, detail=detail) if status < 500:
            return status, ErrorBody(ErrorDetail(str(detail), "invalid_request_error", None, None))
    message = f"internal error; the server's log has it under request id {request_id}"
    return 500, ErrorBody(ErrorDetail(message, "server_error", None, "internal_error"))


def error_response(error: Exception, request_id: str, method: str = "", path: str = "") -> Response:
    """`path`: as the router sees it. It says whose dialect is spoken."""
    status, body = describe(error, request_id, f"{method} {path}")
    note(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, errors.OctavoError) and error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, errors.RequestFailed | errors.DeadlineExceeded):
        headers["x-should-retry"] = "false"  # clients of OpenAI's heed it: the same request would fare the same
    if status == 408:
        headers["connection"] = "close"  # what is still to come would be taken for the next request
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = error.challenge
    shape = next((shape for root, shape in ERROR_SHAPES.items() if path == root or path.startswith(root + "/")), None)
    told = body if shape is None else shape(status, body.error, request_id)
    return Response(msgspec.json.encode(told), status, headers, media_type="application/json")


def error_event(error: Exception, request_id: str) -> bytes:
    """An error after the first byte of a stream: an event of its own, then the end."""
    _, body = describe(error, request_id)
    return b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n"


def note(error: Exception) -> None:
    if (journey := current.get()) is not None:
        journey.note(error)
