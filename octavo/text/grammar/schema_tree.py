"""rebuilt(): copies a JSON schema with a function applied to every schema in it. It only knows which keywords hold schemas and
which hold data."""

from collections.abc import Callable, Mapping
from typing import Any

_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_DATA = {
    "enum",
    "const",
    "default",
    "examples",
    "required",
    "dependentRequired",
}  # hold data: "$ref" is just a key in it

Change = Callable[[dict[str, Any]], dict[str, Any]]


def rebuilt(schema: Any, change: Change) -> Any:
    """Return a copy. `change` is called with every schema, innermost first, and returns its replacement."""
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
