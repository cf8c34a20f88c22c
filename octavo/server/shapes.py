"""Shape: what a route gives back, for the OpenAPI document. An endpoint's module names its routes' in SHAPES.
Knows nothing of the document. Beside it, the schemas of fields whose values are checked by hand."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import WithJsonSchema


@dataclass(frozen=True, slots=True)
class Shape:
    answer: Any = None  # a msgspec type; None: no JSON
    media: tuple[str, ...] = ()  # of answers that are no JSON
    form: dict[str, Any] | None = None  # what a multipart body holds, as a JSON schema
    error: dict[str, Any] | None = None  # where a dialect has error bodies of its own
    leads_to: tuple[str, ...] = ()  # routes whose path takes the id of this answer


EVENTS = ("text/event-stream",)

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
    },
    "required": ["role", "content"],
}

Prompts = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]})
]
"""A string, a list of strings, a list of token ids, a list of lists of token ids."""
Stops = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {**_TEXTS, "minItems": 0}, {"type": "null"}]})]
Messages = Annotated[list[dict[str, Any]], WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]
