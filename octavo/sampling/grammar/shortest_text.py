"""A short answer to a schema, by its alternatives: of each choice the one that takes the fewest tokens.

The search of budgeted_end.py takes the first way that closes, which need not be the shortest where there are alternatives. This one
compares them. It is a proposal: the grammar decides whether it is an answer."""

import contextlib
import functools
import itertools
import json
import json.encoder
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from octavo.sampling.grammar.conjunctions import Conjunctions, NotJoined, may_be
from octavo.sampling.grammar.grammar_schemas import only_schema, schemas_of
from octavo.sampling.grammar.pattern_ends import can_match, pattern_of_format, shortest_match
from octavo.text.grammar.keywords import UNIQUE

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
_SCALARS = {"null": "null", "boolean": "true"}
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
# The keywords of each type that are taken into account. A keyword of another type says nothing of a value.
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": _NUMBER,
    "integer": _NUMBER,
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "$comment"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
    ),
}
_KNOWN = frozenset({keyword for keywords in _OF_TYPE.values() for keyword in keywords})
_MAX_JOINED = 128  # combinations of schemas of one grammar whose parts are collected
_MAX_ITEMS = 1000  # that an array requires
_DECIMALS = 12  # of numbers that are tried
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_ROOT = "#"


class _Unknown(Exception):
    """A part whose shortest value is not known here."""


class _Pending(_Unknown):
    """A definition whose text is not known yet."""


class _Impossible(_Unknown):
    """A part that no value satisfies."""


def shortest_text(schema: Schema, count: Count, *, is_guess: bool = False) -> str | None:
    """None: it is not known here. `is_guess`: keywords and alternatives that are not known here are left out of account."""
    try:
        return _Texts(schema, count, is_guess=is_guess).root()
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
            name = _name_of(reference)
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
        self._known: dict[str, str] = {}  # definitions whose text is known, and the root
        self._unknown: set[str] = set()  # … and those of which it cannot be
        self._impossible: set[str] = set()  # … and those that no value satisfies
        self._num_referred = 0
        self._is_recursive = False  # it refers to the root
        self._conjunctions = Conjunctions(self._target)

    def root(self) -> str:
        self._define()
        self._known[_ROOT] = self._of(self._root)
        if self._is_recursive:  # definitions that refer to the root are known once it is
            self._define()
            self._known[_ROOT] = self._of(self._root)
        return self._known[_ROOT]

    def collect(self, values: dict[str, None], members: dict[tuple[str, str], bool]) -> None:
        """Add the values and members of all parts."""
        self._define()
        waiting: list[Any] = [self._root]
        num_joined = 0
        while waiting:
            part = waiting.pop()
            if not isinstance(part, dict):
                continue
            for value in part["enum"][:_MAX_VALUES] if isinstance(part.get("enum"), list) else ():
                values[_written(value)] = None
            if text := self._guessed(part):
                values[text] = None
            if len(part) > 1 and part.keys() & {"allOf", "anyOf", "$ref"} and num_joined < _MAX_JOINED:
                with contextlib.suppress(_Unknown):  # values of parts that several schemas are about
                    cases = self._cases(part)
                    num_joined += len(cases)
                    waiting += cases
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
                except _Impossible:
                    self._impossible.add(name)
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
            raise _Impossible
        if schema is True or not schema:
            return "0"
        if not isinstance(schema, dict):
            raise _Unknown
        own = {key: value for key, value in schema.items() if key not in ("$defs", "x-guidance")}
        match own:
            case {"$ref": str(reference), **rest} if not rest:
                return self._referred(reference)
            case {"anyOf": list(parts), **rest} if not rest:
                return self._best(self._some(parts))
            case {"anyOf": _} | {"allOf": _} | {"$ref": _}:
                return self._best(self._some(self._cases(own)))
            case {"const": value, **rest}:
                return self._value([value], rest)
            case {"enum": list(values), **rest}:
                return self._value(values, rest)
            case {"type": list(types), **rest}:
                return self._best(self._some([{"type": name, **rest} for name in types]))
            case {"type": str(name), **rest}:
                return self._typed(name, rest)
        return self._best(self._some([{"type": name, **own} for name in _TYPES]))

    def _value(self, values: list[Any], rest: Schema) -> str:
        found = [_written(value) for value in values if not rest or may_be(value, rest)]
        if not found:
            raise _Impossible
        return self._best(found)

    def _cases(self, schema: Schema) -> list[Schema]:
        try:
            return self._conjunctions.cases(schema)
        except NotJoined:
            raise _Unknown from None

    def _some(self, parts: list[Any]) -> list[str]:
        """Texts of the parts. One that cannot be known might be the shortest; one that is not known yet is compared in the next round."""
        found: list[str] = []
        is_pending = False
        for part in parts:
            try:
                found.append(self._of(part))
            except _Impossible:
                continue
            except _Pending:
                is_pending = True
            except _Unknown:
                if not self._is_guess:
                    raise
        if not found:
            raise _Pending if is_pending else _Impossible
        return found

    def _target(self, reference: str) -> Any:
        return self._root if reference == "#" else self._defs.get(_name_of(reference), False)

    def _referred(self, reference: str) -> str:
        self._num_referred += 1
        name = _ROOT if reference == _ROOT else _name_of(reference)
        self._is_recursive |= name == _ROOT
        if name in self._impossible:
            raise _Impossible
        if name in self._unknown or (name not in self._defs and name != _ROOT):
            raise _Unknown
        if name not in self._known:
            raise _Pending
        return self._known[name]

    def _typed(self, name: str, rest: Schema) -> str:
        if name in _SCALARS:
            return _SCALARS[name]
        if not self._is_guess and rest.keys() - _KNOWN:
            raise _Unknown
        own = {key: value for key, value in rest.items() if key in _OF_TYPE[name]}
        match name:
            case "string":
                return _string(own)
            case "array":
                return self._array(own)
            case "object":
                return self._object(own)
        if (number := next(_numbers(own, name == "integer"), None)) is None:
            raise _Unknown
        return number

    def _array(self, rest: Schema) -> str:
        least, first, others = int(rest.get("minItems", 0)), rest.get("prefixItems", []), rest.get("items", True)
        if least > rest.get("maxItems", least):
            raise _Impossible
        if least > _MAX_ITEMS:
            raise _Unknown
        if rest.get("$comment") == UNIQUE and least > 1:
            if first:
                raise _Unknown
            items = [*itertools.islice(self._different(others), least)]
            if len(items) < least:
                raise _Unknown
        else:
            items = [self._of(part) for part in first[:least]]
            items += [self._of(others)] * (least - len(items)) if least > len(items) else []
        return f"[{','.join(items)}]"

    def _different(self, schema: Any, num_followed: int = 0) -> Iterator[str]:
        """Different values of a schema."""
        if schema is False:
            return
        part: Schema = {} if schema is True else schema
        match part:
            case dict() if not part:
                yield from map(str, range(_MAX_ITEMS))
            case {"$ref": str(reference), **rest} if not rest and num_followed < _ROUNDS:
                yield from self._different(self._target(reference), num_followed + 1)
            case {"enum": list(values), **rest}:
                yield from sorted((_written(value) for value in values if not rest or may_be(value, rest)), key=len)
            case {"type": "integer" | "number" as name, **rest} if not rest.keys() - _NUMBER:
                yield from _numbers(rest, name == "integer")
            case {"type": "string", **rest} if not rest.keys() - {"minLength", "maxLength"}:
                least, most = int(rest.get("minLength", 0)), rest.get("maxLength", _MAX_ITEMS)
                for length in range(least, min(most, least + 2) + 1):
                    yield from (
                        _written(f"{'a' * max(0, length - 1)}{last}") for last in (_LETTERS if length else ("",))
                    )
            case _:
                raise _Unknown

    def _object(self, rest: Schema) -> str:
        listed, patterns = rest.get("properties", {}), rest.get("patternProperties", {})
        required = dict.fromkeys(rest.get("required", ()))
        others = [name for name in required if name not in listed]
        members = [(name, listed[name]) for name in listed if name in required]
        members += [(name, _unlisted(name, rest)) for name in others]
        parts = [f"{_written(name)}:{self._of(part)}" for name, part in members]
        if len(parts) > rest.get("maxProperties", len(parts)):
            raise _Impossible
        if len(parts) < rest.get("minProperties", 0):
            if rest["minProperties"] > len(parts) + 1:
                raise _Unknown
            more = [(name, part) for name, part in listed.items() if name not in required]
            named = [(shortest_match(pattern), part) for pattern, part in patterns.items()]
            more += [(name, part) for name, part in named if name is not None and name not in listed]
            more += [("", _unlisted("", rest))] if "" not in listed else []
            texts = self._some(
                [{"type": "object", "properties": {name: part}, "required": [name]} for name, part in more]
            )
            parts.append(self._best(texts)[1:-1])
        return f"{{{','.join(parts)}}}"


def _unlisted(name: str, rest: Schema) -> Any:
    """The schema of a property that is not listed."""
    for pattern, part in rest.get("patternProperties", {}).items():
        if can_match(pattern, name):
            return part
    return rest.get("additionalProperties", True)


def _name_of(reference: str) -> str:
    return unquote(reference.removeprefix("#/$defs/")).replace("~1", "/").replace("~0", "~")


def _string(rest: Schema) -> str:
    pattern, least = rest.get("pattern") or pattern_of_format(rest.get("format", "")), int(rest.get("minLength", 0))
    if least > rest.get("maxLength", least):
        raise _Impossible
    if pattern is None:
        if "format" in rest:
            raise _Unknown
        return _written("a" * least)
    patterns = [pattern] if isinstance(pattern, str) else pattern
    for text in (shortest_match(one, least) for one in patterns):
        if text is None:
            break
        if least <= len(text) <= rest.get("maxLength", len(text)) and all(can_match(one, text) for one in patterns):
            return _written(text)
    raise _Unknown


def _numbers(rest: Schema, is_integer: bool) -> Iterator[str]:
    """Numbers within bounds, from the one that is nearest to 0 on; with more decimals where there are none with fewer."""
    bounds = {key: Fraction(str(rest[key])) for key in _NUMBER & rest.keys()}
    lows = [bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds]
    highs = [bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds]
    num_found = 0
    units = [Fraction(1, 10**places) for places in range(1 if is_integer else _DECIMALS)]
    for unit in [bounds["multipleOf"]] if "multipleOf" in bounds else units:
        for sign, nearest in ((1, max([Fraction(0), *lows])), (-1, max([unit, *(-high for high in highs)]))):
            first = math.ceil(nearest / unit)
            for number in (sign * at * unit for at in range(first, first + _MAX_ITEMS)):
                if any(number < low for low in lows) or any(number > high for high in highs):
                    break
                is_out = number == bounds.get("exclusiveMinimum") or number == bounds.get("exclusiveMaximum")
                if not is_out and not (is_integer and number.denominator > 1):
                    num_found += 1
                    yield f"{Decimal(number.numerator) / number.denominator:f}"
        if num_found:
            return


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _written(value: Any) -> str:
    return json.encoder.encode_basestring(value) if isinstance(value, str) else _encode(_whole(value))


def _whole(value: Any) -> Any:
    """Numbers as the compiler writes them: those without a fraction as integers."""
    match value:
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case list():
            return [_whole(part) for part in value]
        case dict():
            return {key: _whole(part) for key, part in value.items()}
    return value
