"""The keywords of JSON schemas in their classes: those that the grammar enforces as they are, those that lower.py rewrites into such
ones, and constraints that nothing here enforces. Every other keyword is an annotation: it constrains no value."""

from typing import Literal

Draft = Literal[4, 6, 7, 2019, 2020]

LATEST: Draft = 2020
LAST_WITHOUT_SIBLINGS = 7  # up to this draft, keywords beside $ref have no effect

# Enforced as they are. json_schema.py checks their values.
PLAIN = frozenset({
    "type", "enum", "const", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "pattern",
})  # fmt: skip
BY_NAME = ("properties", "patternProperties")  # objects of schemas
LISTS = ("allOf", "anyOf", "prefixItems")  # lists of schemas
SINGLES = ("items", "additionalProperties")  # schemas

HOLDERS = ("$defs", "definitions")  # hold schemas that others refer to
NOT_DATA = frozenset({"enum", "const", "default", "examples", "example"})
"""Keywords whose values are data: nothing in them is a schema."""

# Rewritten, where that is possible.
REWRITTEN = frozenset({
    "format", "$ref", "$dynamicRef", "$recursiveRef", "not", "if", "then", "else", "oneOf", "dependentRequired", "dependentSchemas",
    "dependencies", "propertyNames", "uniqueItems", "contains", "minContains", "maxContains", "unevaluatedProperties",
    "unevaluatedItems", "additionalItems", "nullable",
})  # fmt: skip

# Constraints of older drafts that are not enforced.
NEVER = frozenset({"divisibleBy", "disallow", "extends"})

# Keywords that have done their work once references are resolved. They are no annotations, and not named back.
IDENTITY = frozenset({"$schema", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", *HOLDERS})

# What each constraint applies to: without such a value it has no effect.
APPLIES_TO = {
    "propertyNames": "object", "dependentRequired": "object", "dependentSchemas": "object", "unevaluatedProperties": "object",
    "uniqueItems": "array", "contains": "array", "unevaluatedItems": "array",
}  # fmt: skip

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that are enforced. Any other is an annotation."""

UNIQUE = "uniqueItems"
"""The value of $comment in an array's schema whose items must differ. The compiler ignores it; sampling/grammar/guarded_matcher.py
enforces it. Clients' own comments are annotations, and left out."""

_DRAFTS: dict[str, Draft] = {
    "json-schema.org/draft-04/schema": 4,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft/2020-12/schema": 2020,
}


def draft_of(schema: object) -> Draft | None:
    """The draft that a value of $schema names. None: none that is known."""
    if not isinstance(schema, str):
        return None
    return _DRAFTS.get(schema.removeprefix("http://").removeprefix("https://").rstrip("#"))
