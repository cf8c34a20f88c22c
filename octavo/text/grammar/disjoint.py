"""Whether it is certain that no value satisfies two of several schemas, by their types, their values, or those of a property."""

import functools
import operator
from collections.abc import Hashable, Sequence
from typing import Any

Schema = dict[str, Any]

_MAX_PAIRS = 50_000  # of schemas that are compared one by one
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
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


def all_differ(shapes: Sequence[Schema]) -> bool:
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
            return all(map(all_differ, groups))
    if is_object and any(map(all_differ, properties)):
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
        keys = [{(_JSON_TYPES[type(value)], frozen(value)) for value in own or ()} for own in values]
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


def _differ(one: Schema, other: Schema) -> bool:
    """Whether it is certain that no value satisfies both."""
    if _types(one).isdisjoint(_types(other)):
        return True
    own, others = _values(one), _values(other)
    if own is not None and others is not None:
        return {*map(frozen, own)}.isdisjoint(map(frozen, others))
    if _types(one) != {"object"} or _types(other) != {"object"}:
        return False
    shared = one.get("properties", {}).keys() & other.get("properties", {}).keys()
    return any(_differ(one["properties"][name], other["properties"][name]) for name in shared)
