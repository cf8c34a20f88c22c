"""Prepares a JSON schema for the grammar compiler: lower.py rewrites it, and here each value, the references and the sizes are
checked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.text.grammar.keywords import BY_NAME, FORMATS, LISTS, SINGLES, UNIQUE
from octavo.text.grammar.limits import MAX_OPTIONAL, MAX_REFERENCES, longest_chain
from octavo.text.grammar.lower import DEFS, MAX_DEPTH, MAX_NODES, Lowered, lower
from octavo.text.grammar.multiples import MAX_MULTIPLE, Budget, scaled
from octavo.text.grammar.references import escaped as _escaped
from octavo.text.grammar.references import unescaped
from octavo.text.grammar.regex import ascii_classes, without_look_ahead
from octavo.text.grammar.schema_tree import rebuilt
from octavo.text.grammar.shapes import (
    A_BOUND,
    A_COUNT,
    A_MULTIPLE,
    A_TYPE,
    MAX_COUNT,
    TYPES,
    are_strings,
    is_number,
    is_type,
)

Schema = dict[str, Any]

_MAX_PLACE = 4096  # characters of a place: names of nested properties together
_MAX_SAFE = 2**53  # beyond this, readers of JSON no longer agree on integers

# These patterns check leap years, the lengths of months and 60 seconds per minute, which the compiler's own formats do not.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAY}|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOURS}:[0-5][0-9](\\.[0-9]{{1,9}})?(Z|[+-]{_HOURS})"
# The same addresses as the compiler's own format. It is written with repetitions of one class of characters, so that the masks in it are
# composed of prepared ones (text/tokenize/vocabulary.py): 7 microseconds in place of 120.
_LABEL = "[a-zA-Z0-9]+(-+[a-zA-Z0-9]+)*"
_ATOM = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_OCTET = "([0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_EMAIL = f"{_ATOM}(\\.{_ATOM})*@({_LABEL}(\\.{_LABEL})*|\\[({_OCTET}\\.){{3}}{_OCTET}\\])"
_PATTERNS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "email": _EMAIL}
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
_MOST = ("maxLength", "maxItems", "maxProperties")
_NO_LIMIT = 2**24  # characters or items: more than any answer has
_PLACES = ("$defs",)  # hold schemas that others refer to
_SAME_PLACE = ("allOf", "anyOf", "oneOf")


def _is_bound(value: object) -> bool:
    return is_number(value) and abs(value) <= _MAX_SAFE


def _is_count(value: object) -> bool:
    return is_number(value) and value == int(value) and 0 <= value <= MAX_COUNT


_COUNT = (_is_count, A_COUNT)
_BOUND = (_is_bound, A_BOUND)
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (is_type, A_TYPE),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a non-empty list"),
    "const": (lambda value: True, ""),
    "required": (are_strings, "a list of strings"),
    "minimum": _BOUND,
    "maximum": _BOUND,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
    "multipleOf": (
        lambda value: _is_bound(value) and value > 0 and scaled(value) <= MAX_MULTIPLE,
        A_MULTIPLE,
    ),
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
    "pattern": (lambda value: isinstance(value, str), "a string"),
    "format": (lambda value: value in FORMATS, f"one of {', '.join(FORMATS)}"),
    "$ref": (lambda value: isinstance(value, str), "a string"),
    "uniqueItems": (lambda value: value is True, "true or false"),
}
"""Keywords that do not hold schemas: the check of their value, and a description of valid values."""


def prepare(
    schema: object,
    field: Field,
    budget: Budget | None = None,
    *,
    may_leave_out: bool = False,
    is_followed: bool = False,
) -> Lowered:
    """Check a schema and return it in the form that the compiler accepts, with the annotations and constraints that were left out.
    `field`: the request's field that it came in. `may_leave_out`: leave out what cannot be enforced, instead of refusing it.
    `is_followed`: where the schema's value is in an answer is known, so that its arrays can be kept to uniqueItems."""
    lowered = lower(schema, field, may_leave_out=may_leave_out, is_followed=is_followed, can_check=budget is None)
    lowered.schema = _Checker(lowered.schema, field, budget or Budget()).run()
    return lowered


def without_patterns(schema: Any, is_bad: Callable[[str], bool], *, only_names: bool = False) -> tuple[Any, list[str]]:
    """A prepared schema without the patterns that the compiler cannot enforce, and these. `only_names`: those of properties' names."""
    verdicts: dict[str, bool] = {}

    def bad(pattern: str) -> bool:
        if pattern not in verdicts:
            verdicts[pattern] = is_bad(pattern)
        return verdicts[pattern]

    def change(node: Schema) -> Schema:
        found = dict(node)
        if not only_names and isinstance(found.get("pattern"), str) and bad(found["pattern"]):
            del found["pattern"]
        if isinstance(found.get("patternProperties"), dict) and any(map(bad, found["patternProperties"])):
            # Which names are additional is not known, either.
            found["patternProperties"] = {
                name: part for name, part in found["patternProperties"].items() if not bad(name)
            }
            found.pop("additionalProperties", None)
        return found

    kept = rebuilt(schema, change)
    return kept, [pattern for pattern, is_left_out in verdicts.items() if is_left_out]


def _within_reach(key: str, value: object) -> object:
    """A limit that no answer comes to, such as that of 64-bit integers, as one that is enforced. None: none is needed."""
    if key in _UPPER and is_number(value) and value > _MAX_SAFE:
        return _MAX_SAFE
    if key in _LOWER and is_number(value) and value < -_MAX_SAFE:
        return -_MAX_SAFE
    if key in _MOST and is_number(value) and value > MAX_COUNT:
        return MAX_COUNT if value < _NO_LIMIT else None
    return value


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
        for place, reference in self._written.items():
            self._at[place]["$ref"] = reference  # type: ignore[index]
        return prepared

    # ── each schema by itself ──

    def _schema(self, schema: object, place: str, depth: int) -> Schema | bool:
        self._num_nodes += 1
        if depth > 2 * MAX_DEPTH or self._num_nodes > 4 * MAX_NODES:
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
        for key, value in _with_patterns(schema).items():
            if (kept := self._keyword(key, value, place, depth)) is not None or key == "const":
                node[key] = kept
        if node.pop("uniqueItems", False):
            node["$comment"] = UNIQUE
        self._budget.can_join |= "allOf" in node or ("$ref" in node and len(node) > 1)
        self._count_properties(node, place)
        if node.get("type") == "integer" and "enum" not in node and "const" not in node:
            _bound(node)
        return node

    def _keyword(self, key: str, value: object, place: str, depth: int) -> object:
        here = f"{place}/{_escaped(key)}"
        if key in BY_NAME or key in _PLACES:
            if not isinstance(value, Mapping):
                raise self._invalid(here, "must be an object of schemas")
            parts = {name: self._schema(part, f"{here}/{_escaped(name)}", depth + 1) for name, part in value.items()}
            return {ascii_classes(name): part for name, part in parts.items()} if key == "patternProperties" else parts
        if key in LISTS:
            if not isinstance(value, list) or not value:
                raise self._invalid(here, "must be a non-empty list of schemas")
            return [self._schema(part, f"{here}/{at}", depth + 1) for at, part in enumerate(value)]
        if key in SINGLES:
            return self._schema(value, here, depth + 1)
        value = _within_reach(key, value)
        if value is None:
            return None
        will_do, words = _VALUES[key]
        if not will_do(value):
            raise self._invalid(here, f"must be {words}")
        if will_do is _is_count and isinstance(value, float):
            return int(value)  # 2.0 is a valid count too
        if key == "pattern" and isinstance(value, str):
            return ascii_classes(without_look_ahead(value))
        if key == "multipleOf" and is_number(value) and not self._budget.spend(value):
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
                + f": 'minProperties' (at {_shown(place)}) is enforced up to 1, or up to the number of required properties, got {least}"
            )
        if (optional := len(node.get("properties", {}).keys() - required)) > MAX_OPTIONAL:
            raise self._invalid(place, f"has {optional} optional properties; at most {MAX_OPTIONAL} are allowed")

    # ── references ──

    def _check_reference(self, place: str) -> None:
        node = self._at[place]
        if not isinstance(node, dict) or "$ref" not in node:
            return
        target = "#" if node["$ref"] == "#" else DEFS + node["$ref"].removeprefix(DEFS)
        assert target in self._at, "lower.py has resolved it"
        node["$ref"] = target
        self._written[place] = "#" + quote(target[1:], safe="/~!$&'()*+,;=:@")

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
                    raise InvalidRequest(self._field + f": {_shown(following)} refers to itself")
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
        types = node.get("type", TYPES)
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

    def _invalid(self, place: str, words: str) -> InvalidRequest:
        return InvalidRequest(self._field + f": {_shown(place)} {words}")


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


def _with_patterns(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the formats of dates, times and addresses into patterns."""
    found = dict(schema)
    if found.get("format") in _PATTERNS and isinstance(found.get("allOf", []), list):
        pattern = f"^{_PATTERNS[found.pop('format')]}$"
        if "pattern" in found:
            found["allOf"] = [*found.get("allOf", []), {"pattern": pattern}]
        else:
            found["pattern"] = pattern
    return found


def _shown(place: str) -> str:
    """A place as the author wrote it: definitions are named by where they stood."""
    if not place.startswith(DEFS):
        return place
    name, _, rest = place.removeprefix(DEFS).partition("/")
    return unescaped(name) + ("/" + rest if rest else "")
