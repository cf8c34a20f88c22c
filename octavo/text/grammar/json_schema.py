"""Prepares a JSON schema for the grammar compiler. Each construct is either one that the grammar enforces, or is rejected by
name."""

import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard
from urllib.parse import quote, unquote

from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.text.grammar.limits import MAX_OPTIONAL, MAX_REFERENCES, longest_chain
from octavo.text.grammar.multiples import MAX_MULTIPLE, Budget, scaled
from octavo.text.grammar.regex import ascii_classes

Schema = dict[str, Any]

MAX_DEPTH = 64  # nested schemas
MAX_NODES = 20_000
_MAX_PLACE = 4096  # characters of a place: names of nested properties together
_MAX_SAFE = 2**53  # beyond this, readers of JSON no longer agree on integers
_MAX_COUNT = 100_000  # characters, items or properties

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# These patterns check leap years, the lengths of months and 60 seconds per minute, which the compiler's own formats do not.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY}|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOURS}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOURS})"
_MOMENTS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
# Annotations: they do not constrain the output.
_NOTES = {"title", "description", "default", "examples", "example", "readOnly", "writeOnly", "deprecated", "$comment",
          "$schema", "$id", "contentMediaType", "contentEncoding", "contentSchema", "discriminator"}  # fmt: skip
_PLACES = ("$defs", "definitions")  # hold schemas that others refer to
_BY_NAME = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_TAG_DEPTH = 2  # levels of properties to search for what distinguishes the alternatives of oneOf
_MAX_PAIRS = 50_000  # of alternatives of oneOf that are compared one by one
_SAME_PLACE = ("allOf", "anyOf", "oneOf")


def _is_number(value: object) -> TypeGuard[int | float]:
    # Not isfinite for integers: it overflows where they are larger than any float.
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_bound(value: object) -> bool:
    return _is_number(value) and abs(value) <= _MAX_SAFE


def _is_count(value: object) -> bool:
    return _is_number(value) and value == int(value) and 0 <= value <= _MAX_COUNT


def _is_type(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _are_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_COUNT = (_is_count, f"a whole number from 0 to {_MAX_COUNT}")
_BOUND = (_is_bound, "a number between -2**53 and 2**53")
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one or several of {', '.join(_TYPES)}"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a non-empty list"),
    "const": (lambda value: True, ""),
    "required": (_are_strings, "a list of strings"),
    "minimum": _BOUND,
    "maximum": _BOUND,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
    "multipleOf": (
        lambda value: _is_bound(value) and value > 0 and scaled(value) <= MAX_MULTIPLE,
        f"a number above 0 and, without its decimal point, at most {MAX_MULTIPLE}",
    ),
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
    "pattern": (lambda value: isinstance(value, str), "a string"),
    "format": (lambda value: value in _FORMATS, f"one of {', '.join(_FORMATS)}"),
    "$ref": (lambda value: isinstance(value, str), "a string"),
    "$anchor": (lambda value: isinstance(value, str), "a string"),
}
"""Keywords that do not hold schemas: the check of their value, and a description of valid values."""


def prepare(schema: object, field: Field, budget: Budget | None = None) -> Schema | bool:
    """Check a schema and return it without annotations, in the form that the compiler accepts. `field`: the request's field that
    it came in."""
    return _Checker(schema, field, budget or Budget()).run()


def _bound(node: Schema) -> None:
    """Bound an integer at ±2**53 if the schema does not: otherwise a model could write digits forever."""
    for inclusive, exclusive, end in (
        ("minimum", "exclusiveMinimum", -_MAX_SAFE),
        ("maximum", "exclusiveMaximum", _MAX_SAFE),
    ):
        if inclusive not in node and exclusive not in node:
            node[inclusive] = end


class _Checker:
    def __init__(self, schema: object, field: Field, budget: Budget) -> None:
        self._root = schema
        self._budget = budget
        self._field = field
        self._num_nodes = 0
        self._at: dict[str, Schema | bool] = {}  # place (a JSON pointer) → the schema there
        self._written: dict[str, str] = {}  # place → its $ref as a URI fragment
        self._shapes: dict[tuple[str, int], Schema] = {}  # (place, depth) → what _shape() returns

    def run(self) -> Schema | bool:
        prepared = self._schema(self._root, "#", 0)
        for place in [*self._at]:
            self._check_reference(place)
        if not self._budget.is_kept:
            raise self._invalid(
                "#",
                f"has multipleOf values that allOf or $ref may combine: their common multiple must be at most {MAX_MULTIPLE}",
            )
        if self._written:  # without references there are no cycles
            self._check_loops()
            self._check_chains()
            self._check_ends()
        for place, node in self._at.items():
            if isinstance(node, dict) and "oneOf" in node:
                self._settle_one_of(node, place)
        for place, reference in self._written.items():
            self._at[place]["$ref"] = reference  # type: ignore[index]
        return prepared

    # ── each schema by itself ──

    def _schema(self, schema: object, place: str, depth: int) -> Schema | bool:
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise InvalidRequest(
                self._field
                + f" is too large: at most {MAX_DEPTH} levels of schemas and {MAX_NODES} schemas in total are allowed"
            )
        if len(place) > _MAX_PLACE:
            raise InvalidRequest(
                self._field + f": names of nested properties have more than {_MAX_PLACE} characters together"
            )
        if isinstance(schema, bool):
            self._at[place] = schema
            return schema
        if not isinstance(schema, Mapping):
            raise self._invalid(place, "must be a schema: an object, true or false")
        node: Schema = {}
        self._at[place] = node
        for key, value in _translated(schema).items():
            if key in _NOTES or key.startswith("x-"):
                continue
            node[key] = self._keyword(key, value, place, depth)
        self._budget.can_join |= "allOf" in node or ("$ref" in node and len(node) > 1)
        self._count_properties(node, place)
        if node.get("type") == "integer" and "enum" not in node and "const" not in node:
            _bound(node)
        return node

    def _keyword(self, key: str, value: object, place: str, depth: int) -> object:
        here = f"{place}/{_escaped(key)}"
        if key in _BY_NAME or key in _PLACES:
            if not isinstance(value, Mapping):
                raise self._invalid(here, "must be an object of schemas")
            parts = {name: self._schema(part, f"{here}/{_escaped(name)}", depth + 1) for name, part in value.items()}
            return {ascii_classes(name): part for name, part in parts.items()} if key == "patternProperties" else parts
        if key in _LISTS:
            if not isinstance(value, list) or not value:
                raise self._invalid(here, "must be a non-empty list of schemas")
            return [self._schema(part, f"{here}/{at}", depth + 1) for at, part in enumerate(value)]
        if key in _SINGLES:
            return self._schema(value, here, depth + 1)
        if key not in _VALUES:
            raise Unsupported(
                self._field + f": {key!r} (at {place}) cannot be enforced and is not supported: leave it out"
            )
        will_do, words = _VALUES[key]
        if not will_do(value):
            raise self._invalid(here, f"must be {words}")
        if will_do is _is_count and isinstance(value, float):
            return int(value)  # 2.0 is a valid count too
        if key == "pattern" and isinstance(value, str):
            return ascii_classes(value)
        if key == "multipleOf" and _is_number(value) and not self._budget.spend(value):
            raise self._invalid(here, f"is too large: the sum of all multipleOf values must be at most {MAX_MULTIPLE}")
        return value

    def _count_properties(self, node: Schema, place: str) -> None:
        """Check minProperties. A name that is not listed may occur twice, and then counts once: a minimum number of distinct names
        cannot be enforced."""
        least, required = node.get("minProperties", 0), {*node.get("required", ())}
        if least <= len(required):
            node.pop("minProperties", None)
        elif least > 1:
            raise Unsupported(
                self._field
                + f": 'minProperties' (at {place}) is enforced up to 1, or up to the number of required properties, got {least}"
            )
        if (optional := len(node.get("properties", {}).keys() - required)) > MAX_OPTIONAL:
            raise self._invalid(place, f"has {optional} optional properties; at most {MAX_OPTIONAL} are allowed")

    # ── references ──

    def _check_reference(self, place: str) -> None:
        node = self._at[place]
        if not isinstance(node, dict) or "$ref" not in node:
            return
        wanted = node["$ref"]
        target = self._target(wanted)
        if target is None:
            why = "does not exist in this schema" if wanted.startswith("#") else "points outside this schema"
            raise InvalidRequest(self._field + f": $ref {wanted[:80]!r} (at {place}) {why}")
        node["$ref"] = target
        self._written[place] = "#" + quote(target[1:], safe="/~!$&'()*+,;=:@")

    def _target(self, reference: str) -> str | None:
        if not reference.startswith("#"):
            return None
        name = unquote(reference[1:])
        if name and not name.startswith("/"):
            return self._anchors.get(name)
        place = "#" + name
        return place if place in self._at else None

    @functools.cached_property
    def _anchors(self) -> dict[str, str]:
        """Anchor → its place; of several, the first."""
        nodes = [
            (node["$anchor"], place) for place, node in self._at.items() if isinstance(node, dict) and "$anchor" in node
        ]
        return dict(reversed(nodes))

    def _same(self, place: str) -> Iterator[str]:
        """Places of schemas that apply to the same value."""
        node = self._at[place]
        if not isinstance(node, dict):
            return
        if "$ref" in node:
            yield node["$ref"]
        for key in _SAME_PLACE:
            yield from (f"{place}/{key}/{at}" for at in range(len(node.get(key, ()))))

    def _check_loops(self) -> None:
        """Reject a schema that refers back to itself for the same value: it would mean nothing."""
        done: set[str] = set()
        for start in self._at:
            path: set[str] = set()
            stack: list[tuple[str, Iterator[str]]] = []
            if start not in done:
                stack.append((start, self._same(start)))
                path.add(start)
            while stack:
                place, rest = stack[-1]
                following = next(rest, None)
                if following is None:
                    done.add(place)
                    stack.pop()
                    path.discard(place)
                elif following in path:
                    raise InvalidRequest(self._field + f": {following} refers to itself")
                elif following not in done:
                    stack.append((following, self._same(following)))
                    path.add(following)

    def _check_chains(self) -> None:
        """Limit how deep references lead: the compiler recurses on them, and the stack is finite."""
        targets = {self._at[place]["$ref"] for place in self._written}  # type: ignore[index]
        edges: dict[str, list[str]] = {place: [] for place in ("#", *targets)}
        for place in self._written:
            edges[_innermost(place, edges)].append(self._at[place]["$ref"])  # type: ignore[index]
        for target in targets - {"#"}:  # a schema contains those at places inside it
            edges[_innermost(target.rpartition("/")[0], edges)].append(target)
        if (chain := longest_chain(edges) - 1) > MAX_REFERENCES:
            raise InvalidRequest(
                self._field + f" has a chain of {chain} references ($ref); at most {MAX_REFERENCES} are allowed"
            )

    def _check_ends(self) -> None:
        """Reject a schema that no finite value satisfies, such as one whose required parts contain itself."""
        ends: set[str] = set()
        searches = {place: self._search_end(place, ends) for place in self._at}
        waiting: dict[str, list[str]] = {}  # place → the places of which one must end before its search goes on
        awaited: dict[str, list[tuple[str, list[str]]]] = {}  # place → the searches that wait for it, and their wait
        ready = [*self._at]  # the last is searched first: schemas inside others come after these
        while ready:
            place = ready.pop()
            missing = next(searches[place], None)
            if missing is not None:
                waiting[place] = missing
                for other in missing:
                    awaited.setdefault(other, []).append((place, missing))
            elif place not in ends:
                ends.add(place)
                ready += [other for other, wait in awaited.pop(place, ()) if waiting[other] is wait]
        if "#" not in ends:
            raise InvalidRequest(self._field + ": no finite output satisfies this schema")

    def _search_end(self, place: str, ends: set[str]) -> Iterator[list[str]]:
        """Search for a finite value of the schema at a place. Yields places, of which one must come into `ends` before the search
        can go on; none: it is in vain. Is exhausted when there is such a value."""
        node = self._at[place]
        if not isinstance(node, dict):
            if not node:
                yield []
            return
        yield from _until_all([node["$ref"]] if "$ref" in node else [], ends)
        yield from _until_all([f"{place}/allOf/{at}" for at in range(len(node.get("allOf", ())))], ends)
        for key in ("anyOf", "oneOf"):
            parts = [f"{place}/{key}/{at}" for at in range(len(node.get(key, ())))]
            if parts and ends.isdisjoint(parts):
                yield parts
        types = node.get("type", _TYPES)
        names = [types] if isinstance(types, str) else types
        if "const" in node or "enum" in node or not {*names} <= {"object", "array"}:
            return
        by_type = [_until_all(self._needed(name, node, place), ends) for name in names]
        while True:
            missing = [next(search, None) for search in by_type]
            if None in missing:
                return
            yield [other for wait in missing for other in wait or ()]

    def _needed(self, name: str, node: Schema, place: str) -> list[str]:
        """Places of the schemas that every object or array of this schema has a value of."""
        if name == "object":
            others = f"{place}/additionalProperties"
            parts = [f"{place}/properties/{_escaped(required)}" for required in node.get("required", ())]
            needed = [part if part in self._at else others for part in parts]
        else:
            parts = [f"{place}/prefixItems/{at}" for at in range(len(node.get("prefixItems", ())))]
            least = int(node.get("minItems", 0))
            needed = [*parts[:least], *([f"{place}/items"] if least > len(parts) else [])]
        return [part for part in needed if part in self._at]

    # ── oneOf ──

    def _settle_one_of(self, node: Schema, place: str) -> None:
        """Turn oneOf into anyOf if no value can satisfy two alternatives. If this cannot be decided here, oneOf is left to the
        compiler, which rejects it if it cannot decide either."""
        if "anyOf" in node:
            return
        parts = [self._shape(f"{place}/oneOf/{at}") for at in range(len(node["oneOf"]))]
        if _all_differ(parts):
            node["anyOf"] = node.pop("oneOf")

    def _shape(self, place: str, depth: int = 0) -> Schema:
        """The schema at a place, with the schemas of its required properties, and with bare references followed."""
        node = self._at[place]
        while isinstance(node, dict) and "$ref" in node and len(node) == 1:
            place = node["$ref"]
            node = self._at[place]
        if not isinstance(node, dict):
            return {}
        if (place, depth) not in self._shapes:
            required = [
                name for name in node.get("required", ()) if name in node.get("properties", ()) and depth < _TAG_DEPTH
            ]
            inner = {name: self._shape(f"{place}/properties/{_escaped(name)}", depth + 1) for name in required}
            self._shapes[place, depth] = {**node, "properties": inner}
        return self._shapes[place, depth]

    def _invalid(self, place: str, words: str) -> InvalidRequest:
        return InvalidRequest(self._field + f": {place} {words}")


def _innermost(place: str, among: Mapping[str, object]) -> str:
    """The place of `among` that is this one or the innermost around it."""
    while place not in among:
        place = place.rpartition("/")[0]
    return place


def _until_all(places: Sequence[str], ends: set[str]) -> Iterator[list[str]]:
    """Yield each place until it is in `ends`."""
    for place in places:
        while place not in ends:
            yield [place]


def _translated(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite older drafts' keywords (`items` as a list), drop keywords without effect, and turn date and time formats into
    patterns."""
    found = dict(schema)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found.pop("additionalItems")
        if not found["prefixItems"]:
            del found["prefixItems"]
    if (
        isinstance(found.get("format"), str)
        and found["format"] in _MOMENTS
        and isinstance(found.get("allOf", []), list)
    ):
        moment = {"pattern": f"^{_MOMENTS[found.pop('format')]}$"}
        found["allOf"] = [*found.get("allOf", []), moment]
    for key, nothing in (("uniqueItems", False), ("nullable", False), ("patternProperties", {}), ("unevaluatedProperties", True),
                         ("unevaluatedItems", True), ("additionalItems", True)):  # fmt: skip
        if key in found and found[key] == nothing:
            del found[key]
    return found


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_JSON_TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def _types(shape: Schema) -> set[str]:
    if (values := _values(shape)) is not None:
        return {_JSON_TYPES[type(value)] for value in values}
    types = shape.get("type", _TYPES)
    return {"number" if name == "integer" else name for name in ([types] if isinstance(types, str) else types)}


def _values(shape: Schema) -> Sequence[Any] | None:
    if "const" in shape:
        return [shape["const"]]
    values: Sequence[Any] | None = shape.get("enum")
    return values


def _all_differ(shapes: Sequence[Schema]) -> bool:
    """Whether it is certain that no value satisfies two of them. Divides them by their types, their values or those of a property,
    in time that grows with their size; only few are compared pair by pair."""
    if len(shapes) < 2:
        return True
    names = functools.reduce(operator.and_, (shape.get("properties", {}).keys() for shape in shapes))
    properties = [[shape["properties"][name] for shape in shapes] for name in names]
    is_object = all(_types(shape) == {"object"} for shape in shapes)
    for distinguishing in (shapes, *(properties if is_object else ())):
        groups = _divided(shapes, distinguishing)
        if len(groups) > 1:
            return all(map(_all_differ, groups))
    if is_object and any(map(_all_differ, properties)):
        return True
    if len(shapes) * (len(shapes) - 1) // 2 > _MAX_PAIRS:
        return False
    return all(_differ(one, other) for at, one in enumerate(shapes) for other in shapes[:at])


def _divided(shapes: Sequence[Schema], distinguishing: Sequence[Schema]) -> list[list[Schema]]:
    """Groups of shapes; two of different groups have no type, or no value, in common. `distinguishing`: for each shape the schema to
    compare: itself, or that of a property."""
    keys: list[set[Hashable]] = [{*_types(schema)} for schema in distinguishing]
    values = [_values(schema) for schema in distinguishing]
    if all(own is not None for own in values):
        keys = [{(_JSON_TYPES[type(value)], _frozen(value)) for value in own or ()} for own in values]
    group_of: dict[Hashable, list[int]] = {}
    for number, own_keys in enumerate(keys):
        met = {id(group_of[key]): group_of[key] for key in own_keys if key in group_of}
        largest = max(met.values(), key=len, default=[])
        for group in met.values():
            if group is not largest:
                for member in group:
                    group_of.update(dict.fromkeys(keys[member], largest))
                largest += group
        largest.append(number)
        group_of.update(dict.fromkeys(own_keys, largest))
    groups = {id(group): group for group in group_of.values()}
    return [[shapes[number] for number in group] for group in groups.values()]


def _frozen(value: object) -> Hashable:
    """A value that hashes, and equals another's if their values are equal."""
    match value:
        case list():
            return "list", *map(_frozen, value)
        case dict():
            return "dict", frozenset((key, _frozen(item)) for key, item in value.items())
        case _:
            assert isinstance(value, Hashable)
            return value


def _differ(one: Schema, other: Schema) -> bool:
    """Whether it is certain that no value satisfies both."""
    if _types(one).isdisjoint(_types(other)):
        return True
    own, others = _values(one), _values(other)
    if own is not None and others is not None:
        return {*map(_frozen, own)}.isdisjoint(map(_frozen, others))
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return False
    shared = one.get("properties", {}).keys() & other.get("properties", {}).keys()
    return any(_differ(one["properties"][name], other["properties"][name]) for name in shared)
