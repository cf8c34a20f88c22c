"""Whether it is certain that no value satisfies two of several schemas: by their types, their values, those of a property or of the
first item, or a property that one requires and the other forbids."""

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.text.grammar.negate import common_types, type_of
from octavo.text.grammar.shapes import wrong_shape

Schema = dict[str, Any]
Said = tuple[Schema | bool, bool]
"""A lowered schema, and whether it says what its author said: what was narrowed has more in allOf."""
Follow = Callable[[str], Said]
"""A reference → the schema that it leads to."""

_MAX_PAIRS = 50_000  # of schemas that are compared one by one
_MAX_CONJUNCTS = 256  # schemas of one value
_TAG_DEPTH = 2  # levels of properties to search for what distinguishes the alternatives of oneOf
_TYPES = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of the values of a schema. All of them have it; others may have it too."""

    types: frozenset[str]  # integers are numbers
    values: Sequence[Any] | None = None  # None: not listed
    required: frozenset[str] = frozenset()
    forbidden: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None  # all names that an object may have; None: others too
    properties: Mapping[str, "Shape"] = field(default_factory=dict)  # of those that are required
    first: "Shape | None" = None  # of the first item of an array that has one; None: not known

    @property
    def is_object(self) -> bool:
        return self.types == {"object"}

    def lacks(self, names: frozenset[str]) -> bool:
        """Whether its objects cannot have one of these names."""
        return not self.forbidden.isdisjoint(names) or (self.allowed is not None and not names <= self.allowed)


def shape_of(parts: Sequence[Said], follow: Follow, depth: int = 0) -> Shape:
    """The shape of the values that satisfy all these schemas. They are lowered, so their keywords have values of the right kinds."""
    nodes = _conjuncts(parts, follow)
    types: list[str] = [*_TYPES]
    lists: list[Sequence[Any]] = []
    required: dict[str, None] = {}
    allowed: frozenset[str] | None = None
    inner: dict[str, list[Said]] = {}
    first: list[Said] = []
    is_empty = True  # arrays may be
    for node, is_own in nodes:
        if "type" in node:
            types = common_types(types, [node["type"]] if isinstance(node["type"], str) else node["type"])
        lists += [[node["const"]]] if "const" in node else [node["enum"]] if "enum" in node else []
        required |= dict.fromkeys(node.get("required", ()))
        for name, part in node.get("properties", {}).items():
            inner.setdefault(name, []).append((part, is_own))
        if node.get("additionalProperties") is False and "patternProperties" not in node:
            own = frozenset(node.get("properties", ()))
            allowed = own if allowed is None else own & allowed
        is_empty &= node.get("minItems", 0) < 1
        first += [(part, is_own) for part in [*node.get("prefixItems", ()), node.get("items", True)][:1]]
    values = min(lists, key=len, default=None)
    names = types if values is None else map(type_of, values)
    is_deep = depth >= _TAG_DEPTH
    return Shape(
        frozenset("number" if name == "integer" else name for name in names),
        values,
        frozenset(required),
        frozenset(name for name, said in inner.items() if any(part is False for part, _ in said)),
        allowed,
        {name: shape_of(inner[name], follow, depth + 1) for name in required if name in inner and not is_deep},
        None if is_empty or is_deep else shape_of(first, follow, depth + 1),
    )


def outline(schema: object, depth: int = 0) -> Schema | bool:
    """What a schema that is not lowered says of its values' shape, as far as it does itself."""
    if not isinstance(schema, Mapping) or "$ref" in schema or schema.get("nullable") is True:
        return True  # beside a reference, keywords may have no effect
    found = {key: schema[key] for key in ("type", "enum", "const", "required") if key in schema}
    found = {key: value for key, value in found.items() if not wrong_shape(key, value)}
    listed = schema.get("properties")
    if isinstance(listed, Mapping):
        found["properties"] = {
            name: outline(part, depth + 1) if depth < _TAG_DEPTH else True for name, part in listed.items()
        }
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            found["additionalProperties"] = False
    return found


def _conjuncts(parts: Sequence[Said], follow: Follow) -> list[tuple[Schema, bool]]:
    """All schemas that apply to a value to which these do: they, those of their allOf, and those that they refer to."""
    found: list[tuple[Schema, bool]] = []
    waiting, seen = [*parts], set[int]()
    while waiting and len(found) < _MAX_CONJUNCTS:
        part, is_own = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        found.append((part, is_own))
        if is_own:
            waiting += [(one, True) for one in part.get("allOf", ())]
        if "$ref" in part:
            waiting.append(follow(part["$ref"]))
    return found


def property_names(parts: Sequence[Said], follow: Follow) -> dict[str, None]:
    """Names of properties that these schemas list."""
    return {name: None for node, _ in _conjuncts(parts, follow) for name in node.get("properties", ())}


def all_differ(shapes: Sequence[Shape]) -> bool:
    """Whether it is certain that no value satisfies two of them. Divides them by their types, their values or those of a property,
    in time that grows with their size; only few are compared pair by pair."""
    if len(shapes) < 2:
        return True
    names = functools.reduce(operator.and_, (shape.properties.keys() for shape in shapes))
    properties = [[shape.properties[name] for shape in shapes] for name in sorted(names)]
    is_object = all(shape.is_object for shape in shapes)
    for distinguishing in (shapes, *(properties if is_object else ())):
        groups = _divided(shapes, distinguishing)
        if len(groups) > 1:
            return all(map(all_differ, groups))
    if is_object and any(map(all_differ, properties)):
        return True
    if len(shapes) * (len(shapes) - 1) // 2 > _MAX_PAIRS:
        return False
    return all(_differ(one, other) for at, one in enumerate(shapes) for other in shapes[:at])


def _divided(shapes: Sequence[Shape], distinguishing: Sequence[Shape]) -> list[list[Shape]]:
    """Groups of shapes; two of different groups have no type, or no value, in common. `distinguishing`: for each shape the one to
    compare: itself, or that of a property."""
    keys: list[set[Hashable]] = [{*shape.types} for shape in distinguishing]
    values = [shape.values for shape in distinguishing]
    if all(own is not None for own in values):
        keys = [{(type_of(value), frozen(value)) for value in own or ()} for own in values]
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


def frozen(value: object) -> Hashable:
    """A value that hashes, and equals another's if their values are equal."""
    match value:
        case list():
            return "list", *map(frozen, value)
        case dict():
            return "dict", frozenset((key, frozen(item)) for key, item in value.items())
        case _:
            assert isinstance(value, Hashable)
            return value


def _differ(one: Shape, other: Shape) -> bool:
    """Whether it is certain that no value satisfies both."""
    if one.types.isdisjoint(other.types):
        return True
    if one.values is not None and other.values is not None:
        return {*map(frozen, one.values)}.isdisjoint(map(frozen, other.values))
    if one.types == other.types == {"array"}:
        return one.first is not None and other.first is not None and _differ(one.first, other.first)
    if not one.is_object or not other.is_object:
        return False
    if one.lacks(other.required) or other.lacks(one.required):
        return True
    shared = one.properties.keys() & other.properties.keys()
    return any(_differ(one.properties[name], other.properties[name]) for name in shared)
