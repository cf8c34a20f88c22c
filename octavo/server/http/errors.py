"""The one place where an error becomes an HTTP status and OpenAI's error body."""

from collections.abc import Callable

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo import errors
from octavo.observe.journeys.journey import current
from octavo.server.http.inflate import encodings

CODES: dict[type[errors.OctavoError], str | None] = {
    errors.InvalidRequest: "invalid_value",
    errors.ContextTooLong: "context_length_exceeded",
    errors.Unsupported: "unsupported_parameter",
    errors.Unauthorized: "invalid_api_key",
    errors.Forbidden: "forbidden",
    errors.ModelNotFound: "model_not_found",
    errors.NotFound: "not_found",
    errors.RequestTimeout: "request_timeout",
    errors.TooLarge: "request_too_large",
    errors.UnsupportedEncoding: "unsupported_encoding",
    errors.HeadTooLarge: "head_too_large",
    errors.Overloaded: "rate_limit_exceeded",
    errors.RateLimited: "rate_limit_exceeded",
    errors.BudgetSpent: "insufficient_quota",
    errors.DeadlineExceeded: "deadline_exceeded",
    errors.RequestFailed: "request_failed",
    errors.EngineUnavailable: "engine_unavailable",
    errors.EngineDead: "engine_dead",
}


MAX_MESSAGE_LEN, MAX_PARAM_LEN = 1000, 200
"""Characters. Messages quote only the start of what a client sent; this bounds those that quote several values."""


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
"""Path prefix → error shape. An endpoint whose dialect is not OpenAI's registers its own here."""


def describe(error: Exception, request_id: str, route: str = "") -> tuple[int, ErrorBody]:
    """Status and body. An unexpected error shows only the request id under which the log has it."""
    match error:
        case errors.ConfigError():
            pass  # a start-up mistake cannot happen here: fall through to 500
        case errors.OctavoError():
            code = CODES.get(type(error))
            message, param = error.message[:MAX_MESSAGE_LEN], error.param and error.param[:MAX_PARAM_LEN]
            return error.status, ErrorBody(ErrorDetail(message, error.type, param, code))
        case HTTPException(status_code=404):
            return 404, ErrorBody(ErrorDetail(f"no such route: {route[:400]}", "not_found_error", None, "not_found"))
        case HTTPException(status_code=405):
            message = f"this route does not support that method: {route[:400]}"
            return 405, ErrorBody(ErrorDetail(message, "invalid_request_error", None, "method_not_allowed"))
        case HTTPException(status_code=status, detail=detail) if status < 500:
            return status, ErrorBody(ErrorDetail(str(detail)[:MAX_MESSAGE_LEN], "invalid_request_error", None, None))
    message = f"internal error; see the server's log for request id {request_id}"
    return 500, ErrorBody(ErrorDetail(message, "server_error", None, "internal_error"))


def error_response(error: Exception, request_id: str, method: str = "", path: str = "", hint: str = "") -> Response:
    """`path`: as the router sees it. It decides the dialect of the body. `hint`: what to use, where there is no route at `path`."""
    status, body = describe(error, request_id, f"{method} {path}"[:200] + (f"; {hint}" if hint else ""))
    note(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if isinstance(error, errors.OctavoError) and error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if isinstance(error, errors.UnsupportedEncoding):
        headers["accept-encoding"] = ", ".join((*encodings(), "identity"))  # of requests (RFC 9110, 12.5.3)
    if isinstance(error, errors.RequestFailed | errors.DeadlineExceeded):
        headers["x-should-retry"] = "false"  # OpenAI's clients heed it: the same request would fail again
    if status == 408:
        headers["connection"] = "close"  # the rest of this request would be taken for the next one
    if isinstance(error, errors.Unauthorized):
        headers["www-authenticate"] = error.challenge
    shape = next((shape for root, shape in ERROR_SHAPES.items() if path == root or path.startswith(root + "/")), None)
    content = body if shape is None else shape(status, body.error, request_id)
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_event(error: Exception, request_id: str) -> bytes:
    """The last events of a stream that failed after its first byte."""
    _, body = describe(error, request_id)
    return b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n"


def note(error: Exception) -> None:
    if (journey := current.get()) is not None:
        journey.note(error)
