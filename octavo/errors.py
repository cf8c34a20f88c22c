"""Every error Octavo raises, as one tree.
`status` is the HTTP status that a server should respond with.

OctavoError
├── RequestError            the caller can fix it; carries .param
│   ├── InvalidRequest 400      a field is missing, of the wrong type or out of range
│   ├── ContextTooLong 400      prompt (+ max_tokens) does not fit the context or the KV store
│   ├── Unsupported 400         a known field or value that Octavo does not support
│   ├── Unauthorized 401        missing or wrong API key
│   ├── Forbidden 403           a Host that this server does not go by, a browser on another site's page, or no admin key
│   ├── ModelNotFound 404       the model named in the request is not served here
│   ├── NotFound 404            an object named by its id does not exist, or no longer does
│   ├── RequestTimeout 408      the request did not arrive completely in time
│   ├── TooLarge 413            the request body is over the limit
│   ├── UnsupportedEncoding 415 the body is compressed in a way that is not taken
│   ├── HeadTooLarge 431        the request's head or trailers are over the limit
│   ├── Overloaded 429          the queue is full, or the request left it unserved; carries .retry_after
│   │   ├── RateLimited 429         the API key has reached one of its limits a minute or in flight
│   │   └── BudgetSpent 429         the API key has used up its tokens of the day
│   └── DeadlineExceeded 504     the request's own deadline_ms has passed
├── EngineError
│   ├── RequestFailed 500       this request failed; others continue
│   ├── EngineUnavailable 503   starting or draining; carries .retry_after
│   └── EngineDead 503          the engine process ended
└── ConfigError             start-up: one line that says what to change, exit code 2, no traceback

A RequestError about a field holds the field's path as data (`Field`), in its message too. Dialects of the HTTP API that spell the
field differently rename the path, and the message is made from the renamed one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

MAX_QUOTED = 100  # characters of a client's value in a message


def quote(value: object, most: int = MAX_QUOTED) -> str:
    """A value as Python writes it, cut to about `most` characters. Takes time for the part that is shown only."""
    match value:
        case str() | bytes():
            return repr(value) if len(value) <= most else repr(value[:most]) + "..."
        case int() if value.bit_length() > 4 * most:
            return f"an integer of {value.bit_length()} bits"
        case list() | tuple() if len(value) > 1:
            return _cut(f"[{', '.join(quote(item, most) for item in value[: most // 3])}]", most)
        case Mapping():
            return quote_json(value, most)
        case _:
            return _cut(repr(value), most)


def quote_json(value: object, most: int = 60) -> str:
    """A value as JSON without spaces, cut to `most` characters. Takes time for the part that is shown only."""
    text = ""
    for piece in _json(value, most):
        text += piece
        if len(text) > most:
            break
    return _cut(text, most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _json(value: object, most: int) -> Iterator[str]:
    match value:
        case str():
            yield json.dumps(value[: most + 1], ensure_ascii=False)
        case bool() | None:
            yield json.dumps(value)
        case int():
            yield str(value) if value.bit_length() <= 4 * most else quote(value, most)
        case float():
            yield repr(value)
        case Mapping():
            yield "{"
            for at, (key, item) in enumerate(value.items()):
                yield ("," if at else "") + json.dumps(str(key)[: most + 1], ensure_ascii=False) + ":"
                yield from _json(item, most)
            yield "}"
        case list() | tuple():
            yield "["
            for at, item in enumerate(value):
                yield "," if at else ""
                yield from _json(item, most)
            yield "]"
        case _:
            yield json.dumps(str(value)[: most + 1], ensure_ascii=False)


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
        steps = (f"[{step}]" if isinstance(step, int) else f".{_cut(step, 2 * MAX_QUOTED)}" for step in self.path)
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
    """An error that the caller can fix. `param` names the offending field in the request body: by default the first field that
    the message refers to."""

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
    """The prompt, or the prompt plus max_tokens, does not fit."""


class Unsupported(RequestError):
    """A known field or value that Octavo does not support. It is never ignored silently."""


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    challenge = "Bearer"  # value of the WWW-Authenticate header
    type = "authentication_error"


class Forbidden(RequestError):
    """The request names a Host that this server does not go by or a folder that it does not read, a browser sent it for another site's
    page, or its key may not do this."""

    status = 403
    type = "permission_error"

    def __init__(self, message: str, reason: Literal["host", "origin", "content_type", "key", "folder"]) -> None:
        super().__init__(message)
        self.reason = reason


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


class UnsupportedEncoding(RequestError):
    """The request body is compressed in a way that is not supported."""

    status = 415


class HeadTooLarge(RequestError):
    """The request's head, its trailers or the framing of its chunks exceed the limit."""

    status = 431


class Overloaded(RequestError):
    """The queue is full, or the request left it unserved."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimited(Overloaded):
    """The API key has reached one of its own limits: requests or tokens a minute, or tokens in flight."""


class BudgetSpent(Overloaded):
    """The API key has used up its tokens of the day."""


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
