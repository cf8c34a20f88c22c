"""Conjunctions: several schemas that apply to the same value as one, for each combination of their alternatives.

The result is a guess at what satisfies all of them, of which a short value is made: the grammar decides whether it is an answer. So a
constraint that is not compared here does no harm."""

from collections.abc import Callable
from typing import Any

from octavo.sampling.grammar.pattern_ends import can_match

Schema = dict[str, Any]

MAX_CASES = 64  # combinations of alternatives of one value
_MAX_JOINED = 20_000  # schemas and properties that are joined with others, for one grammar
_MAX_DEPTH = 16
_APART = frozenset({"allOf", "anyOf", "$ref", "$defs", "x-guidance"})
_LEAST = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_MOST = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})


class NotJoined(Exception):
    """There are too many combinations, or a keyword for which there is no common one."""


class _Impossible(Exception):
    """No value satisfies both."""


class Conjunctions:
    """`target`: the schema that a reference leads to."""

    def __init__(self, target: Callable[[str], Any]) -> None:
        self._target = target
        self._num_left = _MAX_JOINED

    def cases(self, schema: Any, depth: int = 0) -> list[Schema]:
        """Schemas without allOf, anyOf and $ref at their top, of which a value of the schema satisfies one. Empty: it has no values."""
        if not isinstance(schema, dict):
            return [{}] if schema else []
        if depth > _MAX_DEPTH:
            raise NotJoined
        own: list[Schema] = [{key: value for key, value in schema.items() if key not in _APART}]
        # In the order of the compiler, which decides about the order of properties.
        found = own if "$ref" not in schema else self._product(self.cases(self._target(schema["$ref"]), depth + 1), own)
        for part in schema.get("allOf", ()):
            found = self._product(found, self.cases(part, depth + 1))
        if "anyOf" in schema:
            found = self._product(found, [case for part in schema["anyOf"] for case in self.cases(part, depth + 1)])
        return found

    def _product(self, some: list[Schema], others: list[Schema]) -> list[Schema]:
        found: list[Schema] = []
        for one in some:
            for other in others:
                try:
                    found.append(self._joined(one, other))
                except _Impossible:
                    continue
                if len(found) > MAX_CASES:
                    raise NotJoined
        return found

    def _joined(self, one: Schema, other: Schema) -> Schema:
        """One schema for both."""
        if not one or not other:
            return one or other
        self._num_left -= 1 + len(one.get("properties", ())) + len(other.get("properties", ()))
        if self._num_left < 0:
            raise NotJoined
        joined = {**one, **other}
        for key in one.keys() & other.keys():
            mine, yours = one[key], other[key]
            if mine == yours:
                continue
            if key in _LEAST:
                joined[key] = max(mine, yours)
            elif key in _MOST:
                joined[key] = min(mine, yours)
            elif key == "type":
                joined[key] = _common_types(_listed(mine), _listed(yours))
            elif key == "required":
                joined[key] = list(dict.fromkeys([*mine, *yours]))
            elif key == "additionalProperties":
                joined[key] = self._both(mine, yours)
            elif key == "pattern":
                joined[key] = [*_listed(mine), *_listed(yours)]
            elif key not in ("const", "enum", "properties", "patternProperties", "items", "prefixItems"):
                raise NotJoined
        if joined.get("type") == []:
            raise _Impossible
        self._join_values(joined, one, other)
        if "properties" in joined:
            self._join_properties(joined, one, other)
        if "items" in joined or "prefixItems" in joined:
            self._join_items(joined, one, other)
        if "patternProperties" in one and "patternProperties" in other:
            mine, yours = one["patternProperties"], other["patternProperties"]
            joined["patternProperties"] = mine | {
                name: self._both(mine[name], part) if name in mine else part for name, part in yours.items()
            }
        return joined

    def _join_values(self, joined: Schema, one: Schema, other: Schema) -> None:
        lists = [
            [part["const"]] if "const" in part else part["enum"]
            for part in (one, other)
            if part.keys() & {"const", "enum"}
        ]
        if not lists:
            return
        values = [value for value in lists[0] if all(_is_among(value, some) for some in lists[1:])]
        values = [value for value in values if may_be(value, joined)]
        if not values:
            raise _Impossible
        for key in ("const", "enum", "pattern", "minLength", "maxLength", *_LEAST, *_MOST):
            joined.pop(key, None)
        joined["enum"] = values

    def _join_properties(self, joined: Schema, one: Schema, other: Schema) -> None:
        names = dict.fromkeys([*one.get("properties", ()), *other.get("properties", ())])
        joined["properties"] = {name: self._both(_property(one, name), _property(other, name)) for name in names}
        if any(joined["properties"].get(name) is False for name in joined.get("required", ())):
            raise _Impossible

    def _join_items(self, joined: Schema, one: Schema, other: Schema) -> None:
        num_first = max(len(part.get("prefixItems", ())) for part in (one, other))
        if num_first:
            joined["prefixItems"] = [self._both(_item(one, at), _item(other, at)) for at in range(num_first)]
        joined["items"] = self._both(one.get("items", True), other.get("items", True))

    def _both(self, one: Any, other: Any) -> Any:
        """A schema for a value to which both apply."""
        if one is True or one == {} or one == other:
            return other
        if other is True or other == {}:
            return one
        if one is False or other is False:
            return False
        cases = self.cases({"allOf": [one, other]})
        return False if not cases else cases[0] if len(cases) == 1 else {"anyOf": cases}


def _property(schema: Schema, name: str) -> Any:
    """The schema of a property, as far as names alone tell."""
    listed = schema.get("properties", {})
    if name in listed:
        return listed[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _item(schema: Schema, at: int) -> Any:
    first = schema.get("prefixItems", ())
    return first[at] if at < len(first) else schema.get("items", True)


def _listed(types: Any) -> list[str]:
    return [types] if isinstance(types, str) else types


def _common_types(some: list[str], others: list[str]) -> str | list[str]:
    found = [name for name in some if name in others or (name == "integer" and "number" in others)]
    found += ["integer"] if "integer" in others and "number" in some and "integer" not in found else []
    return found[0] if len(found) == 1 else found


def _is_among(value: Any, values: list[Any]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def may_be(value: Any, schema: Schema) -> bool:
    """Whether a value may satisfy a schema. True where it is not certain that it does not."""
    types = _listed(schema.get("type", ("null", "boolean", "number", "string", "array", "object")))
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            is_type = "number" in types or ("integer" in types and value == int(value))
            is_above = value >= schema.get("minimum", value) and value > schema.get("exclusiveMinimum", value - 1)
            is_below = value <= schema.get("maximum", value) and value < schema.get("exclusiveMaximum", value + 1)
            return is_type and is_above and is_below
        case str():
            is_long = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
            return (
                "string" in types
                and is_long
                and all(can_match(pattern, value) for pattern in _listed(schema.get("pattern", [])))
            )
        case list():
            return "array" in types
    return "object" in types
