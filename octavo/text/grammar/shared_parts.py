"""shared(): writes parts of a JSON schema that occur more than once, such as the pattern of a name that many objects have, as one
definition. The compiler takes its time for each part where it stands, and once for a definition.

Only values of properties and items of arrays are shared, and only those that hold no further objects and no references: so chains of
references become longer by one at most. Schemas whose parts may be joined with others (`allOf`, `$ref` with siblings) are left as they are."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

_LEAST = 40  # characters of a part that is worth a definition
_BY_NAME = ("properties", "patternProperties")
_SINGLES = ("items", "additionalProperties")
_LISTS = ("anyOf", "prefixItems")
_HELD = frozenset(
    {*_BY_NAME, *_SINGLES, *_LISTS, "allOf", "$ref", "$defs", "$comment"}
)  # that a shared part may not have


def shared(schema: Schema) -> Schema:
    """The schema itself if there is nothing to share. The schema is a prepared one."""
    found: list[str] = []
    if not _list_texts(schema, found):
        return schema
    names: dict[str, str] = {}
    taken = schema.get("$defs", {})
    for text, count in Counter(found).items():
        if count > 1:
            number = len(names)
            while f"shared-{number}" in taken:
                number += len(taken) + 1
            names[text] = f"shared-{number}"
    if not names:
        return schema
    definitions: Schema = {}
    changed = _rewritten(schema, names, definitions)
    return {**changed, "$defs": {**changed.get("$defs", {}), **definitions}}


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """The schemas directly in a schema, and whether each is the value of a property or the item of an array."""
    for key in (*_BY_NAME, "$defs"):
        for part in schema.get(key, {}).values():
            yield part, key != "$defs"
    for key in _SINGLES:
        yield schema.get(key), True
    for key in _LISTS:
        for part in schema.get(key, ()):
            yield part, False


def _list_texts(schema: object, found: list[str]) -> bool:
    """Add the texts of parts that may be shared. False: parts of the schema may be joined."""
    if (
        not isinstance(schema, dict) or "$comment" in schema
    ):  # items must differ: what they may be is read where they stand
        return True
    if "allOf" in schema or ("$ref" in schema and not schema.keys() <= {"$ref", "$defs"}):
        return False
    for part, is_value in _parts(schema):
        if is_value and (text := _text(part)):
            found.append(text)
        elif not _list_texts(part, found):
            return False
    return True


def _text(part: object) -> str:
    """Of a part that may be shared. Empty: it may not, or is not worth it."""
    if not isinstance(part, dict) or not _HELD.isdisjoint(part.keys() - {"items", "anyOf"}):
        return ""
    for inner in (part.get("items"), *part.get("anyOf", ())):
        if isinstance(inner, dict) and not _HELD.isdisjoint(inner):
            return ""
    text = repr(part)
    return text if len(text) >= _LEAST else ""


def _rewritten(schema: Schema, names: Mapping[str, str], definitions: Schema) -> Schema:
    def value(part: Any) -> Any:
        text = _text(part)
        if text not in names:
            return whole(part)
        definitions[names[text]] = part
        return {"$ref": f"#/$defs/{names[text]}"}

    def whole(part: Any) -> Any:
        return _rewritten(part, names, definitions) if isinstance(part, dict) else part

    if "$comment" in schema:
        return schema
    changed = dict(schema)
    for key in _BY_NAME:
        if key in schema:
            changed[key] = {name: value(part) for name, part in schema[key].items()}
    if "$defs" in schema:
        changed["$defs"] = {name: whole(part) for name, part in schema["$defs"].items()}
    for key in _SINGLES:
        if key in schema:
            changed[key] = value(schema[key])
    for key in _LISTS:
        if key in schema:
            changed[key] = [whole(part) for part in schema[key]]
    return changed
