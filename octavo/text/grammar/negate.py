"""Negation of JSON schemas: the values that a schema rejects, as schemas. Only of keywords whose negation the grammar compiler can
express; the others raise CannotNegate."""

import itertools
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

Schema = dict[str, Any]
TYPES = ("null", "boolean", "number", "string", "array", "object")

_MAX_ALTERNATIVES = 64
_MAX_CHARACTERS, _MAX_LENGTH = 2000, 60  # of strings that are excluded: together, and of one
_ANY = "(?s:.)*"


class CannotNegate(Exception):
    """Holds the keyword."""


Resolve = Callable[[str], Schema | bool]
"""The schema that a $ref points to. Raises CannotNegate where it is not known yet."""


def negated(schema: Schema | bool, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    """Schemas of which a value satisfies at least one exactly if it does not satisfy `schema`, for values of `types` ("integer" may
    be one of them). Empty: there are none."""
    if isinstance(schema, bool):
        return [{"type": list(types)}] if not schema and types else []
    # Values of other types are rejected by `type` already.
    among = [*types] if "type" not in schema else common_types(types, types_of({"type": schema["type"]}))
    found: list[Schema] = []
    for key, value in schema.items():
        found += (
            _KEYWORDS[key](value, types if key == "type" else among, resolve) if key in _KEYWORDS else _unknown(key)
        )
        if len(found) > _MAX_ALTERNATIVES:
            raise CannotNegate(key)
    return found


def types_of(schema: Schema | bool) -> list[str]:
    """The types that a schema allows by its own `type`, `enum` or `const`; all where it does not say."""
    if not isinstance(schema, dict):
        return [*TYPES] if schema else []
    values = (
        schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    )
    if values is not None:
        return list(dict.fromkeys(type_of(value) for value in values))
    given = schema.get("type", TYPES)
    return [given] if isinstance(given, str) else [name for name in given if isinstance(name, str)]


def common_types(types: Sequence[str], others: Sequence[str]) -> list[str]:
    """The types that are in both lists."""
    found = [name for name in types if name in others or (name == "integer" and "number" in others)]
    return [*found, "integer"] if "integer" in others and "number" in types and "number" not in others else found


def type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def any_of(schemas: list[Schema]) -> Schema | bool:
    if not schemas:
        return False
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def all_but(strings: Sequence[str]) -> str:
    """A pattern of all strings but these."""
    if sum(map(len, strings)) > _MAX_CHARACTERS or any(len(string) > _MAX_LENGTH for string in strings):
        raise CannotNegate("enum")
    tree: dict[str, Any] = {}
    for string in strings:
        node = tree
        for character in string:
            node = node.setdefault(character, {})
        node[""] = {}
    return f"^{_beside(tree)}$"


def _beside(tree: dict[str, Any]) -> str:
    """A pattern of all rests of strings that are not in the tree."""
    following = [character for character in tree if character]
    if not following:
        return f"(?s:.){_ANY}"
    others = "[^" + "".join(f"\\x{{{ord(character):x}}}" for character in following) + "]"
    choices = [re.escape(character) + _beside(tree[character]) for character in following] + [others + _ANY]
    return f"({'|'.join(choices)})" + ("" if "" in tree else "?")


def all_but_numbers(numbers: Sequence[int | float], is_integer: bool) -> list[Schema]:
    """Ranges of all numbers but these."""
    inner: list[Schema]
    ordered = sorted({Fraction(number): number for number in numbers}.items())
    values = [value for key, value in ordered if not is_integer or key.denominator == 1]
    if not values:
        return [{"type": "integer" if is_integer else "number"}]
    if not is_integer:
        inner = [{"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in itertools.pairwise(values)]
        return [
            {"type": "number", **part}
            for part in ({"exclusiveMaximum": values[0]}, *inner, {"exclusiveMinimum": values[-1]})
        ]
    whole = [int(value) for value in values]
    inner = [{"minimum": low + 1, "maximum": high - 1} for low, high in itertools.pairwise(whole) if low + 1 < high]
    return [{"type": "integer", **part} for part in ({"maximum": whole[0] - 1}, *inner, {"minimum": whole[-1] + 1})]


def _unknown(key: str) -> list[Schema]:
    raise CannotNegate(key)


def _type(value: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    given = {value} if isinstance(value, str) else {*value}
    rest = [name for name in types if name not in given and not (name == "integer" and "number" in given)]
    if "number" in rest and "integer" in given:
        raise CannotNegate("type")  # numbers with a fraction
    return [{"type": rest}] if rest else []


def _enum(values: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    found: list[Schema] = []
    for name in types:
        taken = by_type.get("number" if name == "integer" else name)
        if taken is None:
            found.append({"type": name})
        elif name == "string":
            found.append({"type": "string", "pattern": all_but(taken)})
        elif name in ("number", "integer"):
            found += all_but_numbers(taken, name == "integer")
        elif name == "boolean":
            found += [{"const": value} for value in (True, False) if value not in taken]
        elif name != "null":
            raise CannotNegate("enum")
    return found


def _bound(key: str, kinds: Sequence[str]) -> Callable[[Any, Sequence[str], Resolve], list[Schema]]:
    def negate(value: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
        return [{"type": kind, key: value} for kind in kinds if kind in types]

    return negate


def _count(key: str, kind: str, step: int) -> Callable[[Any, Sequence[str], Resolve], list[Schema]]:
    def negate(value: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
        return [{"type": kind, key: value + step}] if kind in types and value + step >= 0 else []

    return negate


def _required(names: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    return [{"type": "object", "properties": {name: False}} for name in names] if "object" in types else []


def _properties(parts: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    found = []
    for name, part in parts.items() if "object" in types else ():
        if rejected := negated(part, TYPES, resolve):
            found.append({"type": "object", "properties": {name: any_of(rejected)}, "required": [name]})
    return found


def _prefix(parts: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    found = []
    for at, part in enumerate(parts if "array" in types else ()):
        if rejected := negated(part, TYPES, resolve):
            found.append({"type": "array", "prefixItems": [*[True] * at, any_of(rejected)], "minItems": at + 1})
    return found


def _trivial(key: str) -> Callable[[Any, Sequence[str], Resolve], list[Schema]]:
    """Of a keyword whose negation is known only where it allows everything."""

    def negate(value: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
        kind = "array" if key == "items" else "object"
        if value is True or value == {} or kind not in types:
            return []
        raise CannotNegate(key)

    return negate


def _all_of(parts: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    return [one for part in parts for one in negated(part, types, resolve)]


def _any_of(parts: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    every = [any_of(negated(part, types, resolve)) for part in parts]
    return [] if any(part is False for part in every) else [{"allOf": every}]


def _reference(value: Any, types: Sequence[str], resolve: Resolve) -> list[Schema]:
    return negated(resolve(value), types, once(resolve, value))


def once(resolve: Resolve, reference: str) -> Resolve:
    """`resolve` within the schema of `reference`, where that reference has no end."""

    def within(wanted: str) -> Schema | bool:
        if wanted == reference:
            raise CannotNegate("$ref")
        return resolve(wanted)

    return within


_NUMBERS = ("number", "integer")
_KEYWORDS: dict[str, Callable[[Any, Sequence[str], Resolve], list[Schema]]] = {
    "type": _type,
    "enum": _enum,
    "const": lambda value, types, resolve: _enum([value], types, resolve),
    "minimum": _bound("exclusiveMaximum", _NUMBERS),
    "maximum": _bound("exclusiveMinimum", _NUMBERS),
    "exclusiveMinimum": _bound("maximum", _NUMBERS),
    "exclusiveMaximum": _bound("minimum", _NUMBERS),
    "minLength": _count("maxLength", "string", -1),
    "maxLength": _count("minLength", "string", 1),
    "minItems": _count("maxItems", "array", -1),
    "maxItems": _count("minItems", "array", 1),
    "minProperties": _count("maxProperties", "object", -1),
    "maxProperties": _count("minProperties", "object", 1),
    "required": _required,
    "properties": _properties,
    "prefixItems": _prefix,
    "items": _trivial("items"),
    "additionalProperties": _trivial("additionalProperties"),
    "patternProperties": _trivial("patternProperties"),
    "allOf": _all_of,
    "anyOf": _any_of,
    "$ref": _reference,
}
