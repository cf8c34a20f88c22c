"""Errors as Ollama's clients read them."""

import msgspec

from octavo.server.http.errors import ErrorDetail, describe
from octavo.server.http.ndjson import line


class OllamaError(msgspec.Struct, frozen=True):
    error: str


def error_body(status: int, detail: ErrorDetail, request_id: str) -> OllamaError:
    return OllamaError(detail.message)


def error_line(error: Exception, request_id: str) -> bytes:
    """The last line of a stream that failed after it had begun."""
    status, body = describe(error, request_id)
    return line(error_body(status, body.error, request_id))


ERROR_SCHEMA = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
