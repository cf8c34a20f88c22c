"""Conditions over the values of one property, as of several `if` in an allOf, one for each kind of a thing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.text.grammar.disjoint import frozen
from octavo.text.grammar.negate import type_of

_FEWEST = 3  # conditions that are worth it; with fewer, their combinations are few
_CONDITION = frozenset({"if", "then", "else"})
_ANNOTATIONS = frozenset({"$comment", "title", "description"})


@dataclass(frozen=True, slots=True)
class Test:
    """A condition: a property has one of some values."""

    name: str
    values: list[Any]
    needs_name: bool  # it is not met where the property is missing
    given: Mapping[str, Any]  # the schema with if, then and else

    def has(self, value: Any) -> bool:
        return any(type_of(value) == type_of(other) and frozen(value) == frozen(other) for other in self.values)

    def branch(self, is_met: bool) -> Any:
        return self.given.get("then" if is_met else "else", True)


def switch_of(parts: object) -> dict[int, Test]:
    """The conditions of an allOf that are about the same property, by their numbers. Empty: there are too few."""
    by_name: dict[str, dict[int, Test]] = {}
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        if (test := _test(part)) is not None:
            by_name.setdefault(test.name, {})[number] = test
    largest = max(by_name.values(), key=len, default={})
    return largest if len(largest) >= _FEWEST else {}


def _test(part: object) -> Test | None:
    """None: it is no such condition, or has more."""
    if not isinstance(part, Mapping) or part.keys() - _CONDITION - _ANNOTATIONS or not part.keys() & {"then", "else"}:
        return None
    condition = part.get("if")
    listed = condition.get("properties") if isinstance(condition, Mapping) else None
    if not isinstance(condition, Mapping) or not isinstance(listed, Mapping) or len(listed) != 1:
        return None
    ((name, said),) = listed.items()
    needed = condition.get("required", [])
    is_plain = not condition.keys() - {"properties", "required", "type"} - _ANNOTATIONS
    if not is_plain or needed not in ([], [name]) or condition.get("type", "object") != "object":
        return None
    match said:
        case {"const": value, **more}:
            values = [value]
        case {"enum": list(values), **more}:
            pass
        case _:
            return None
    if more.keys() - {"type"} - _ANNOTATIONS or ("type" in more and not _are(more["type"], values)):
        return None
    return Test(name, values, bool(needed), part)


def _are(type_name: object, values: list[Any]) -> bool:
    """Whether all values are of a type, so that it says nothing more."""
    return all(type_of(value) == type_name for value in values)
