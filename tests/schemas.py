"""JSON schemas of very different shapes: the test suite's own, ones as people write them, and every leaf in every container."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUITE = Path(__file__).parent / "data" / "json_schema_suite.json"

LEAVES: dict[str, Any] = {
    "null": {"type": "null"},
    "bool": {"type": "boolean"},
    "int": {"type": "integer"},
    "small int": {"type": "integer", "minimum": -3, "maximum": 12},
    "above": {"type": "integer", "exclusiveMinimum": 99},
    "number": {"type": "number"},
    "share": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "quarters": {"type": "number", "multipleOf": 0.25, "minimum": -2, "maximum": 2},
    "fives": {"type": "integer", "multipleOf": 5},
    "string": {"type": "string"},
    "short": {"type": "string", "maxLength": 4},
    "exact": {"type": "string", "minLength": 3, "maxLength": 3},
    "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "contains": {"type": "string", "pattern": "b+a", "maxLength": 8},
    "enum": {"enum": ["red", "green", 'b\\l"ue', "gr/ün", 3, None, [1], {"a": 1}]},
    "const": {"const": {"kind": "x", "at": [1, 2.5, "é"]}},
    "date": {"type": "string", "format": "date"},
    "moment": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email"},
    "either": {"type": ["integer", "string", "null"], "maxLength": 3},
    "union": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "maxLength": 2}, {"const": False}]},
    "both": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}]},
    "one": {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "boolean"}]},
}


def _containers(leaf: Any) -> Iterator[tuple[str, Any]]:
    yield "itself", leaf
    yield "list", {"type": "array", "items": leaf, "minItems": 1, "maxItems": 3}
    yield "optional", {"type": "object", "properties": {"a": leaf, "b": leaf}, "additionalProperties": False}
    yield (
        "required",
        {"type": "object", "properties": {"x y": leaf, "z": {"type": "boolean"}}, "required": ["z", "x y"]},
    )
    yield "map", {"type": "object", "additionalProperties": leaf, "maxProperties": 2}
    yield (
        "tuple",
        {"type": "array", "prefixItems": [leaf, {"const": 0}, leaf], "items": False, "minItems": 3},
    )
    yield (
        "reference",
        {"type": "object", "properties": {"é": {"$ref": "#/$defs/it"}}, "required": ["é"], "$defs": {"it": leaf}},
    )


def _tag(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "title": name,
        "properties": {"kind": {"const": name}, **properties},
        "required": ["kind", *properties],
        "additionalProperties": False,
    }


PEOPLES: dict[str, Any] = {
    "person": {
        "title": "Person",
        "type": "object",
        "properties": {
            "name": {"type": "string", "description": "who", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}], "default": None},
        },
        "required": ["name", "age", "email"],
        "additionalProperties": False,
    },
    "linked list": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
            }
        },
    },
    "tree": {
        "type": "object",
        "properties": {
            "leaf": {"type": "boolean"},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["leaf"],
        "additionalProperties": False,
    },
    "shapes": {
        "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/box"}],
        "$defs": {
            "circle": _tag("circle", radius={"type": "number", "minimum": 0}),
            "box": _tag("box", sides={"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}),
        },
    },
    "many of a kind": {
        "type": "array",
        "maxItems": 2,
        "items": {"oneOf": [_tag("a", n={"type": "null"}), _tag("b", n={"type": "integer"}), _tag("c")]},
    },
    "settings": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,4}$": {"type": "integer"}},
        "properties": {"on": {"type": "boolean", "deprecated": True}},
        "additionalProperties": False,
        "x-origin": "a generator's own note",
    },
    "draft 7 tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [{"type": "integer"}, {"type": "string", "maxLength": 3}],
        "additionalItems": False,
        "minItems": 2,
    },
    "odd names": {
        "type": "object",
        "properties": {
            '"': {"type": "null"},
            "\\": {"type": "null"},
            "a/b~c": {"$ref": "#/properties/%22"},
            "é😀": True,
        },
        "required": ['"', "\\", "a/b~c"],
        "additionalProperties": False,
    },
    "three of them": {"type": "object", "required": ["a", "b"], "minProperties": 2, "maxProperties": 3},
    "not empty": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "boolean"}},
    "anything": {},
}


def peoples() -> dict[str, Any]:
    """Our own schemas: none of them is refused."""
    found = {f"{name}: {kind}": schema for name, leaf in LEAVES.items() for kind, schema in _containers(leaf)}
    return {**PEOPLES, **found}


@functools.cache
def suite() -> dict[str, Any]:
    schemas: dict[str, Any] = json.loads(SUITE.read_text(encoding="utf-8"))["schemas"]
    return schemas
