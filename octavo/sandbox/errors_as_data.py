"""Request errors as plain data, to carry them from one process to another."""

from typing import Any

from octavo.errors import ContextTooLong, Field, InvalidRequest, RequestError, Sentence, Unsupported

_KINDS: dict[str, type[RequestError]] = {kind.__name__: kind for kind in (InvalidRequest, ContextTooLong, Unsupported)}


def error_data(error: RequestError) -> list[Any]:
    """The error's kind, its message (texts, and fields as lists), and the path of its field."""
    kind = type(error).__name__
    assert kind in _KINDS, f"{kind} cannot be sent"
    parts = [_encodable(part) if isinstance(part, str) else _path(part) for part in error.sentence.parts]
    return [kind, parts, None if error.field is None else _path(error.field)]


def _path(field: Field) -> list[str | int]:
    return [_encodable(step) if isinstance(step, str) else step for step in field.path]


def _encodable(text: str) -> str:
    """The text without lone surrogates, which a client may have sent and which have no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def error_of_data(data: list[Any]) -> RequestError:
    kind, parts, path = data
    sentence = Sentence([part if isinstance(part, str) else Field(*part) for part in parts])
    return _KINDS[kind](sentence, None if path is None else Field(*path))
