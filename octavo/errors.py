"""Every error Octavo raises, as one tree.
`status` is the HTTP status that a server should respond with.

OctavoError
├── RequestError            the caller can fix it; carries .param
│   ├── InvalidRequest 400      a field is missing, of the wrong type or out of range
│   ├── ContextTooLong 400      prompt (+ max_tokens) does not fit the context or the KV store
│   ├── Unsupported 400         a known field or value that Octavo does not support
│   ├── Unauthorized 401        missing or wrong API key
│   ├── ModelNotFound 404       the model named in the request is not served here
│   ├── NotFound 404            an object named by its id does not exist, or no longer does
│   ├── RequestTimeout 408      the request did not arrive completely in time
│   ├── TooLarge 413            the request body is over the limit
│   ├── Overloaded 429          the queue is full, or the request left it unserved; carries .retry_after
│   └── DeadlineExceeded 504     the request's own deadline_ms has passed
├── EngineError
│   ├── RequestFailed 500       this request failed; others continue
│   ├── EngineUnavailable 503   starting or draining; carries .retry_after
│   └── EngineDead 503          the engine process ended
└── ConfigError             start-up: one line that says what to change, exit code 2, no traceback
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
    """An error that the caller can fix. `param` names the offending field in the request body."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""


class ContextTooLong(RequestError):
    """The prompt, or the prompt plus max_tokens, does not fit."""


class Unsupported(RequestError):
    """A known field or value that Octavo does not support. It is never ignored silently."""


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    challenge = "Bearer"  # value of the WWW-Authenticate header
    type = "authentication_error"


class ModelNotFound(RequestError):
    """The request names a model that this server does not serve."""

    status = 404
    type = "not_found_error"


class NotFound(RequestError):
    """The object that the request names by id does not exist, or no longer does."""

    status = 404
    type = "not_found_error"


class RequestTimeout(RequestError):
    """The client did not send the announced request in time."""

    status = 408


class TooLarge(RequestError):
    """The request body exceeds the limit."""

    status = 413


class Overloaded(RequestError):
    """The queue is full, or the request left it unserved."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    """The request's own deadline passed before it finished."""

    status = 504
    type = "timeout_error"


class EngineError(OctavoError):
    """An error on the server's side."""


class RequestFailed(EngineError):
    """This request failed; the others continue."""


class EngineUnavailable(EngineError):
    """The engine is starting or draining."""

    status = 503

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDead(EngineError):
    """The engine process ended; the results of its current step are lost."""

    status = 503


class ConfigError(OctavoError):
    """A start-up mistake. The message is one line and says what to change."""
