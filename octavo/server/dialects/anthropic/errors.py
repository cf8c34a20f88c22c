"""Errors as Anthropic's clients read them."""

import msgspec

from octavo.server.http.errors import ErrorDetail, describe
from octavo.server.http.sse import typed_event

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag="error"):
    error: AnthropicError
    request_id: str


def error_body(status: int, detail: ErrorDetail, request_id: str) -> AnthropicErrorBody:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicErrorBody(AnthropicError(kind, detail.message), request_id)


def error_event(error: Exception, request_id: str) -> bytes:
    """The last event of a stream that failed after it had begun."""
    status, body = describe(error, request_id)
    return typed_event(error_body(status, body.error, request_id))


_TEXT = {"type": "string"}
_DETAIL = {"type": "object", "properties": {"type": _TEXT, "message": _TEXT}, "required": ["type", "message"]}
ERROR_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "error"}, "error": _DETAIL, "request_id": _TEXT},
    "required": ["type", "error", "request_id"],
}
