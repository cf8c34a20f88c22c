"""propertyNames: which names a schema of strings allows, as a list or as a pattern."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.text.grammar.negate import CannotNegate, once
from octavo.text.grammar.regex import ascii_classes

_KNOWN = {"type", "enum", "const", "pattern", "minLength", "maxLength"}
_MAX_LISTED = 1000


class NamesUnknown(Exception):
    """The names that a schema allows cannot be expressed here. Says why."""


@dataclass(slots=True)
class Names:
    """All names, if there is neither a list nor a pattern."""

    listed: list[str] | None = None
    pattern: str | None = None
    least: int = 0  # characters
    most: int | None = None

    @property
    def is_any(self) -> bool:
        return self.listed is None and self.pattern is None

    def has(self, name: str) -> bool:
        if self.listed is not None:
            return name in self.listed
        return self.pattern is None or _matches(self.pattern, name)


def allowed_names(schema: Any, resolve: Callable[[str], Any]) -> Names:
    """`schema`: as lower.py makes it."""
    if isinstance(schema, bool):
        return Names() if schema else Names(listed=[])
    if [*schema] == ["$ref"]:
        reference = schema["$ref"]
        try:
            target = resolve(reference)
        except CannotNegate:
            raise NamesUnknown("'$ref' in it") from None
        return allowed_names(target, once(resolve, reference))
    if unknown := schema.keys() - _KNOWN:
        raise NamesUnknown(f"{min(unknown)!r} in it")
    types = schema.get("type", "string")
    if "string" not in (types if isinstance(types, list) else [types]):
        return Names(listed=[])
    pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        fitting = [
            value
            for value in values
            if isinstance(value, str)
            and (pattern is None or _matches(pattern, value))
            and least <= len(value)
            and (most is None or len(value) <= most)
        ]
        if len(fitting) > _MAX_LISTED:
            raise NamesUnknown(f"more than {_MAX_LISTED} names")
        return Names(listed=list(dict.fromkeys(fitting)))
    if least or most is not None:
        if pattern is not None:
            raise NamesUnknown("a pattern and a length together")
        return Names(pattern=f"^(?s:.){{{int(least)},{'' if most is None else int(most)}}}$")
    return Names(pattern=pattern)


def _matches(pattern: str, name: str) -> bool:
    try:
        if "\n" in name:  # "$" of Python also matches before a line break at the end
            raise NamesUnknown("a name has a line break")
        return re.search(ascii_classes(pattern), name) is not None
    except (re.error, RecursionError, OverflowError):
        raise NamesUnknown("its pattern is not read here") from None
