"""JSON schemas as trees: a copy with every schema in one changed.
Knows nothing of what keywords mean, only which of them hold schemas, by name or not, and which hold data."""

from collections.abc import Callable, Mapping
from typing import Any

_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_DATA = {"enum", "const", "default", "examples"}  # in which "$ref" is only a key

Change = Callable[[dict[str, Any]], dict[str, Any]]


def rebuilt(schema: Any, change: Change) -> Any:
    """`change` sees every schema, the innermost first, and gives what stands in its place."""
    if isinstance(schema, list):
        return [rebuilt(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return change({key: _inner(key, value, change) for key, value in schema.items()})


def _inner(key: str, value: Any, change: Change) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, Mapping):
        return {name: rebuilt(part, change) for name, part in value.items()}
    return rebuilt(value, change)
