"""A short answer to a schema, by its alternatives: of each choice the one that takes the fewest tokens.

The search of budgeted_end.py takes the first way that closes, which need not be the shortest where there are alternatives. This one
compares them. It is a proposal: the grammar decides whether it is an answer."""

import contextlib
import functools
import json
import json.encoder
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from octavo.sampling.grammar.grammar_schemas import only_schema, schemas_of
from octavo.sampling.grammar.pattern_ends import pattern_of_format, shortest_match

Schema = dict[str, Any]
Count = Callable[[bytes], int]
"""The fewest tokens of a text."""

_ROUNDS = 8  # of definitions that refer to each other
_COMPARED = 4  # texts of one choice whose tokens are counted: those with the fewest characters
_MAX_VALUES = 64  # of one enum
_MAX_COUNTED = 8000  # characters of all that are compared by their tokens; then their characters are
# Keywords by where they hold schemas.
_BY_NAME, _LISTS, _SINGLE = (
    {"properties", "patternProperties", "$defs"},
    {"anyOf", "oneOf", "allOf", "prefixItems"},
    {"items", "additionalProperties"},
)
_TYPES = {"null": "null", "boolean": "true", "string": '""', "array": "[]", "object": "{}"}


class _Unknown(Exception):
    """A part whose shortest value is not known here."""


class _Pending(_Unknown):
    """A definition whose text is not known yet."""


def shortest_text(grammar: str, count: Count) -> str | None:
    """None: it is not known here. Only for a grammar that is one schema."""
    schema = only_schema(grammar)
    if schema is None:
        return None
    try:
        return _Texts(schema, count).root()
    except (_Unknown, RecursionError, ValueError):
        return None


@functools.lru_cache(maxsize=2)
def parts_of_grammar(grammar: str) -> tuple[list[str], list[tuple[str, str]], list[tuple[str, str]]]:
    """Of all schemas in a grammar: short values of their parts, and the members of objects, those that are required and the others, as
    name and value. A value that is not known is empty."""
    values: dict[str, None] = {}
    members: dict[tuple[str, str], bool] = {}  # → it is required
    for schema in schemas_of(grammar):
        with contextlib.suppress(RecursionError):
            _Texts(schema, len, is_guess=True).collect(values, members)
    required, optional = ([member for member, is_one in members.items() if is_one is kind] for kind in (True, False))
    return list(values), required, optional


def has_clear_values(grammar: str) -> bool:
    """Whether a grammar is one schema in which no two alternatives are both objects, or both arrays: what may follow a value then does
    not depend on what is in it."""
    schema = only_schema(grammar)
    if schema is None:
        return False
    defs = schema.get("$defs", {})
    waiting: list[Any] = [schema]
    while waiting:
        match waiting.pop():
            case dict() as part:
                if isinstance(parts := part.get("anyOf"), list):
                    kinds = [kind for one in parts for kind in _containers(one, defs)]
                    if len(kinds) > len({*kinds}):
                        return False
                waiting += part.values()
            case list() as parts:
                waiting += parts
    return True


def _containers(schema: Any, defs: Schema, num_followed: int = 0) -> set[str]:
    """Of `object` and `array`: what a value of the schema may be."""
    match schema:
        case {"$ref": str(reference)} if num_followed < 16:
            name = unquote(reference.removeprefix("#/$defs/")).replace("~1", "/").replace("~0", "~")
            return _containers(defs.get(name), defs, num_followed + 1)
        case {"const": value}:
            values = [value]
        case {"enum": list(values)}:
            pass
        case {"type": str(name)}:
            return {name} & {"object", "array"}
        case {"type": list(names)}:
            return {*names} & {"object", "array"}
        case _:
            return {"object", "array"}
    return {"object" if isinstance(value, dict) else "array" for value in values if isinstance(value, dict | list)}


class _Texts:
    """`is_guess`: keywords that are not known here are left out of account."""

    def __init__(self, root: Schema, count: Count, *, is_guess: bool = False) -> None:
        self._root, self._count, self._is_guess = root, count, is_guess
        self._made: dict[int, str | None] = {}  # id of a part → its text
        self._defs: dict[str, Any] = root.get("$defs", {})
        self._num_left = _MAX_COUNTED
        self._known: dict[str, str] = {}  # definitions whose text is known
        self._unknown: set[str] = set()  # … and those of which it cannot be
        self._num_referred = 0

    def root(self) -> str:
        self._define()
        return self._of(self._root)

    def collect(self, values: dict[str, None], members: dict[tuple[str, str], bool]) -> None:
        """Add the values and members of all parts."""
        self._define()
        waiting: list[Any] = [self._root]
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict):
                continue
            for value in part["enum"][:_MAX_VALUES] if isinstance(part.get("enum"), list) else ():
                values[_written(value)] = None
            if text := self._guessed(part):
                values[text] = None
            listed, required = part.get("properties"), part.get("required", ())
            if isinstance(listed, dict):
                for name, value in listed.items():
                    member = (name, self._guessed(value))
                    members[member] = members.get(member, False) or name in required
            for name in required if isinstance(required, list) else ():
                if isinstance(name, str) and not (isinstance(listed, dict) and name in listed):
                    members[name, self._guessed(part.get("additionalProperties", True))] = True
            for key in sorted(_BY_NAME & part.keys()):
                waiting += part[key].values() if isinstance(part[key], dict) else ()
            for key in sorted(_LISTS & part.keys()):
                waiting += part[key] if isinstance(part[key], list) else ()
            waiting += [part[key] for key in sorted(_SINGLE & part.keys())]

    def _guessed(self, part: Any) -> str:
        if id(part) not in self._made:
            try:
                self._made[id(part)] = self._of(part)
            except _Unknown:
                self._made[id(part)] = None
        return self._made[id(part)] or ""

    def _define(self) -> None:
        for _ in range(_ROUNDS):
            before, self._num_referred = dict(self._known), 0
            for name, part in self._defs.items():
                try:
                    self._known[name] = self._best([self._of(part), *([before[name]] if name in before else [])])
                except _Pending:
                    continue
                except _Unknown:
                    self._unknown.add(name)
            if before == self._known or not self._num_referred:
                break

    def _best(self, texts: list[str]) -> str:
        if not texts:
            raise _Unknown
        if len(few := sorted({*texts}, key=lambda text: (len(text), text))[:_COMPARED]) == 1:
            return few[0]
        self._num_left -= sum(map(len, few))
        if self._num_left < 0:
            return few[0]
        return min(few, key=lambda text: (self._count(text.encode()), len(text)))

    def _of(self, schema: Any) -> str:
        if schema is False:
            raise _Unknown
        if schema is True or not schema:
            return "0"
        if not isinstance(schema, dict):
            raise _Unknown
        own = {key: value for key, value in schema.items() if key not in ("$defs", "x-guidance", "$comment")}
        match own:
            case {"$ref": str(reference), **rest} if not rest:
                return self._referred(reference)
            case {"const": value, **rest} if not rest.keys() - {"type"}:
                return _written(value)
            case {"enum": list(values), **rest} if not rest.keys() - {"type"}:
                return self._best([_written(value) for value in values])
            case {"anyOf": list(parts), **rest} if not rest.keys() - {"type"}:
                return self._best(self._some(parts))
            case {"allOf": list(parts), **rest}:
                return self._of(_joined([rest, *parts]))
            case {"type": list(types), **rest}:
                return self._best(self._some([{"type": name, **rest} for name in types]))
            case {"type": str(name), **rest}:
                return self._typed(name, rest)
        raise _Unknown

    def _some(self, parts: list[Any]) -> list[str]:
        """Texts of the parts. One that cannot be known might be the shortest; one that is not known yet is compared in the next round."""
        found: list[str] = []
        for part in parts:
            with contextlib.suppress(_Unknown if self._is_guess else _Pending):
                found += [self._of(part)] if part is not False else []
        if not found:
            raise _Pending
        return found

    def _referred(self, reference: str) -> str:
        self._num_referred += 1
        name = unquote(reference.removeprefix("#/$defs/")).replace("~1", "/").replace("~0", "~")
        if name not in self._known or name in self._unknown:
            raise _Unknown if name in self._unknown or name not in self._defs else _Pending
        return self._known[name]

    def _typed(self, name: str, rest: Schema) -> str:
        match name:
            case "string":
                return _string(rest, self._is_guess)
            case "integer" | "number":
                return _number(rest, self._is_guess)
            case "array":
                return self._array(rest)
            case "object":
                return self._object(rest)
        return _TYPES[name]

    def _array(self, rest: Schema) -> str:
        least, first = int(rest.get("minItems", 0)), rest.get("prefixItems", [])
        if (rest.keys() - {"items", "prefixItems", "minItems", "maxItems"} and not self._is_guess) or least > 64:
            raise _Unknown
        return (
            f"[{','.join(self._of(first[at] if at < len(first) else rest.get('items', True)) for at in range(least))}]"
        )

    def _object(self, rest: Schema) -> str:
        known = {"properties", "required", "additionalProperties", "maxProperties"}
        if rest.keys() - known and not self._is_guess:
            raise _Unknown
        listed, required = rest.get("properties", {}), [*dict.fromkeys(rest.get("required", ()))]
        others = [name for name in required if name not in listed]
        parts = [
            f"{_written(name)}:{self._of(listed.get(name, rest.get('additionalProperties', True)))}"
            for name in [*(name for name in listed if name in required), *others]
        ]
        return f"{{{','.join(parts)}}}"


def _joined(parts: list[Any]) -> Schema:
    """One schema of several that apply to the same value, where they say different things."""
    joined: Schema = {}
    for part in parts:
        if part is True:
            continue
        if not isinstance(part, dict) or any(joined.get(key, value) != value for key, value in part.items()):
            raise _Unknown
        joined |= part
    return joined


def _string(rest: Schema, is_guess: bool) -> str:
    if rest.keys() - {"minLength", "maxLength", "pattern", "format"} and not is_guess:
        raise _Unknown
    pattern = rest.get("pattern") or pattern_of_format(rest.get("format", ""))
    if pattern is None and "format" in rest:
        raise _Unknown
    text = "" if pattern is None else shortest_match(pattern)
    if text is None or (pattern is not None and len(text) < rest.get("minLength", 0)):
        raise _Unknown
    return _written(text or "a" * int(rest.get("minLength", 0)))


def _number(rest: Schema, is_guess: bool) -> str:
    if rest.keys() - {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"} and not is_guess:
        raise _Unknown
    bounds = [rest[key] for key in ("minimum", "maximum") if key in rest]
    if step := rest.get("multipleOf"):
        lowest = max((rest[key] for key in ("minimum", "exclusiveMinimum") if key in rest), default=0)
        first = math.ceil(Fraction(str(lowest)) / Fraction(str(step)))
        bounds = [_plain((first + at) * Fraction(str(step))) for at in range(2)]
    for number in (0, *range(1, 10), *bounds):
        is_above = number >= rest.get("minimum", number) and number > rest.get("exclusiveMinimum", number - 1)
        is_below = number <= rest.get("maximum", number) and number < rest.get("exclusiveMaximum", number + 1)
        if is_above and is_below and (not step or (Fraction(str(number)) / Fraction(str(step))).denominator == 1):
            return _written(number)
    raise _Unknown


def _plain(number: Fraction) -> int | float:
    return int(number) if number.denominator == 1 else float(number)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _written(value: Any) -> str:
    return json.encoder.encode_basestring(value) if isinstance(value, str) else _encode(value)
