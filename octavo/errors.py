"""Every error Octavo raises, as one tree. `status` is the HTTP status that a server answers with.

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

A RequestError that is about a field holds the field's path as data (`Field`), in its message too. Dialects of the HTTP API
that spell the field differently rename the path, and the message is made from the renamed one.
"""

from collections.abc import Callable, Sequence


class Field:
    """A field of a request by its path: Field("tools", 0, "function") / "name" is spelled tools[0].function.name.

    Adding a text to it makes a Sentence, so that a message refers to the field: Field("n") + " must be at least 1"."""

    __slots__ = ("path",)

    def __init__(self, *path: str | int) -> None:
        self.path = path

    def __truediv__(self, step: str | int) -> "Field":
        return Field(*self.path, step)

    def __add__(self, words: "str | Field | Sentence") -> "Sentence":
        return Sentence((self,)) + words

    def __radd__(self, words: str) -> "Sentence":
        return Sentence((words, self))

    def __str__(self) -> str:
        steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return "".join(steps).removeprefix(".")

    def __repr__(self) -> str:
        return f"Field{self.path!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)


class Sentence:
    """A message that refers to fields: its texts and fields in their order."""

    __slots__ = ("parts",)

    def __init__(self, parts: "Sequence[str | Field]" = ()) -> None:
        self.parts = tuple(parts)

    def __add__(self, words: "str | Field | Sentence") -> "Sentence":
        return Sentence((*self.parts, *(words.parts if isinstance(words, Sentence) else (words,))))

    def __radd__(self, words: str) -> "Sentence":
        return Sentence((words, *self.parts))

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    @property
    def fields(self) -> list[Field]:
        return [part for part in self.parts if isinstance(part, Field)]

    def renamed(self, rename: Callable[[Field], Field]) -> "Sentence":
        return Sentence([rename(part) if isinstance(part, Field) else part for part in self.parts])

    def reworded(self, reword: Callable[[str], str]) -> "Sentence":
        """With every text changed, and the fields as they are."""
        return Sentence([part if isinstance(part, Field) else reword(part) for part in self.parts])


class OctavoError(Exception):
    status = 500
    type = "server_error"
    param: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(OctavoError):
    """The caller can fix it. `param` names the offending field in the request body: by default the first field that the
    message refers to."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str | Sentence, param: str | Field | None = None) -> None:
        self.sentence = message if isinstance(message, Sentence) else Sentence((message,))
        self.field = Field(param) if isinstance(param, str) else param
        if param is None and self.sentence.fields:
            self.field = self.sentence.fields[0]
        super().__init__(str(message))
        self.param = None if self.field is None else str(self.field)

    def rename(self, rename: Callable[[Field], Field]) -> None:
        """Call every field, in the message and in `param`, by another name."""
        self.sentence = self.sentence.renamed(rename)
        self.message = str(self.sentence)
        self.args = (self.message,)
        if self.field is not None:
            self.field = rename(self.field)
            self.param = str(self.field)


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
