"""Errors as clients of llama.cpp's server read them: `code` is the HTTP status."""

import msgspec

from octavo.server.http.errors import ErrorDetail, describe


class LlamaErrorDetail(msgspec.Struct, frozen=True):
    code: int
    message: str
    type: str
    param: str | None = None  # ours: the field


class LlamaError(msgspec.Struct, frozen=True):
    error: LlamaErrorDetail


def error_body(status: int, detail: ErrorDetail, request_id: str) -> LlamaError:
    return LlamaError(LlamaErrorDetail(status, detail.message, detail.type, detail.param))


def error_event(error: Exception, request_id: str) -> bytes:
    """The last event of a stream that failed after it had begun. These streams have no [DONE]."""
    status, body = describe(error, request_id)
    return b"data: " + msgspec.json.encode(error_body(status, body.error, request_id)) + b"\n\n"


ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["code", "message", "type"],
        }
    },
    "required": ["error"],
}
