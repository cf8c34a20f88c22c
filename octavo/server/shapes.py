"""Shape: what a route gives back, for the OpenAPI document. An endpoint's module names its routes' in SHAPES.
Knows nothing of the document."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    answer: Any = None  # a msgspec type; None: no JSON
    media: tuple[str, ...] = ()  # of answers that are no JSON
    form: dict[str, Any] | None = None  # what a multipart body holds, as a JSON schema
    error: dict[str, Any] | None = None  # where a dialect has error bodies of its own


EVENTS = ("text/event-stream",)
