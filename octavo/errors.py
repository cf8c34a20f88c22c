"""Every error Octavo raises, as one tree.
Knows nothing of HTTP frameworks: `status` is only the number a server should answer with.

OctavoError
├── RequestError            the caller can fix it; carries .param
│   ├── InvalidRequest 400      a field is missing, of the wrong type or out of range
│   ├── ContextTooLong 400      prompt (+ max_tokens) does not fit the context or the KV store
│   ├── Unsupported 400         a field or value that Octavo knows of and does not offer
│   ├── Unauthorized 401        missing or wrong API key
│   ├── ModelNotFound 404       the model named in the request is not served here
│   ├── NotFound 404            an object named by its id is not, or no longer, here
│   ├── RequestTimeout 408      the request has not come whole in time
│   ├── TooLarge 413            the request body is over the limit
│   ├── Overloaded 429          refused at the door, or left the queue unserved; carries .retry_after
│   └── DeadlineExceeded 504     the request's own deadline_ms has passed
├── EngineError
│   ├── RequestFailed 500       this request only
│   ├── EngineUnavailable 503   starting or draining; carries .retry_after
│   └── EngineDead 503          the engine process ended
└── ConfigError             start-up: one line, what to change, exit 2, no traceback
"""


class OctavoError(Exception):
    status = 500
    type = "server_error"
    param: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(OctavoError):
    """The caller can fix it. `param` names the offending field in the request body."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""


class ContextTooLong(RequestError):
    """The prompt, or the prompt plus what was asked for, cannot fit."""


class Unsupported(RequestError):
    """A field or value that is known and not offered: never ignored in silence."""


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    challenge = "Bearer"  # the ways to show one that the answer offers, as HTTP names them
    type = "authentication_error"


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    type = "not_found_error"


class NotFound(RequestError):
    """An object that the request names by its id is not, or no longer, here."""

    status = 404
    type = "not_found_error"


class RequestTimeout(RequestError):
    """The client does not send what it has announced."""

    status = 408


class TooLarge(RequestError):
    """The request body exceeds the limit."""

    status = 413


class Overloaded(RequestError):
    """Refused at the door because of the backlog."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    """The request's own deadline has passed before it was done."""

    status = 504
    type = "timeout_error"


class EngineError(OctavoError):
    """The caller did nothing wrong."""


class RequestFailed(EngineError):
    """This request failed; the others go on."""


class EngineUnavailable(EngineError):
    """The engine is starting or draining."""

    status = 503

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(EngineError):
    """The engine process ended; what it was computing is lost to this process."""

    status = 503


class ConfigError(OctavoError):
    """A start-up mistake. The message is one line and says what to change."""
