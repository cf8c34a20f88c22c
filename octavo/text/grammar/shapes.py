"""What kind of value each keyword of a JSON schema has. Checked before anything reads the values: lowering, negation and the comparison
of alternatives rely on it. Limits on the values are checked in json_schema.py, and named here too."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from octavo.text.grammar.keywords import BY_NAME, LISTS
from octavo.text.grammar.multiples import MAX_MULTIPLE

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_COUNT = 100_000  # characters, items or properties
A_TYPE = f"one or several of {', '.join(TYPES)}"
A_COUNT = f"a whole number from 0 to {MAX_COUNT}"
A_BOUND = "a number between -2**53 and 2**53"
A_MULTIPLE = f"a number above 0 and, without its decimal point, at most {MAX_MULTIPLE}"


def is_number(value: object) -> TypeGuard[int | float]:
    # Not isfinite for integers: it overflows where they are larger than any float.
    return type(value) is int or (type(value) is float and math.isfinite(value))


def is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_count(value: object) -> bool:
    return is_number(value) and value == int(value) and value >= 0


def _is_full_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_string(value: object) -> bool:
    return isinstance(value, str)


_Check = tuple[Callable[[Any], bool], str]
_NUMBER: _Check = (is_number, A_BOUND)
_COUNT: _Check = (_is_count, A_COUNT)
_STRING: _Check = (_is_string, "a string")
_SCHEMAS: _Check = (_is_object, "an object of schemas")
_LIST: _Check = (_is_full_list, "a non-empty list of schemas")
_SHAPES: dict[str, _Check] = {
    "type": (is_type, A_TYPE),
    "enum": (_is_full_list, "a non-empty list"),
    "required": (are_strings, "a list of strings"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    "multipleOf": (lambda value: is_number(value) and value > 0, A_MULTIPLE),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minContains", "maxContains"), (_is_count, "a whole number from 0 on")),
    **dict.fromkeys(("pattern", "$ref", "$dynamicRef", "$recursiveRef"), _STRING),
    **dict.fromkeys((*BY_NAME, "dependentSchemas"), _SCHEMAS),
    **dict.fromkeys((*LISTS, "oneOf"), _LIST),
    "dependentRequired": (_is_object, "an object of lists of strings"),
    "dependencies": (_is_object, "an object"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
}


def wrong_shape(keyword: str, value: object) -> str:
    """What the keyword's value must be. Empty: it is that, or what it must be is not known here."""
    check = _SHAPES.get(keyword)
    return "" if check is None or check[0](value) else f"must be {check[1]}"
