"""Validates a finished answer against its whole schema, for schemas of which the grammar enforces only a part.

The validator is native code with a regex engine that gives up on patterns that take too long. It resolves no reference outside the
schema. It may still recurse and compute for long, so a server calls it in a confined process only (octavo/sandbox)."""

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import Unsupported
from octavo.text.grammar.keywords import draft_of
from octavo.text.grammar.schema_tree import rebuilt

MAX_BACKTRACKS = 1_000_000  # of one match of a pattern


def is_valid(schema: Any, text: str) -> bool:
    """Whether a text is JSON that satisfies the schema. Formats are annotations here: those that are enforced, the grammar enforces.

    Raises Unsupported if the schema cannot be used for validation."""
    import jsonschema_rs

    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    if draft_of(schema.get("$schema") if isinstance(schema, Mapping) else None) is None:
        schema = rebuilt(_without_draft(schema), _modern)
    schema = rebuilt(schema, _with_null)
    try:
        validator = jsonschema_rs.validator_for(
            schema,
            validate_formats=False,
            retriever=_outside,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS),
        )
        return bool(validator.is_valid(value))
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise Unsupported(f"the schema cannot be used for validation: {str(error)[:200]}") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _outside(uri: str) -> Any:
    raise ValueError(f"{uri} is outside the schema")


def _without_draft(schema: Any) -> Any:
    """A $schema that no validator knows says nothing of the draft."""
    if isinstance(schema, Mapping) and "$schema" in schema:
        return {key: value for key, value in schema.items() if key != "$schema"}
    return schema


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI's nullable is a union with null."""
    types = schema.get("type")
    if schema.get("nullable") is True and isinstance(types, str | list):
        names = [types] if isinstance(types, str) else types
        return {**schema, "type": names if "null" in names else [*names, "null"]}
    return schema


def _modern(schema: dict[str, Any]) -> dict[str, Any]:
    """Older spellings in a schema that names no draft."""
    found = dict(schema)
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items") or [True]
        if "additionalItems" in found:
            found["items"] = found.pop("additionalItems")
    for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and inclusive in found:
            found[exclusive] = found.pop(inclusive)
    if isinstance(dependencies := found.pop("dependencies", None), Mapping):
        for name, part in dependencies.items():
            key = "dependentRequired" if isinstance(part, list | str) else "dependentSchemas"
            found[key] = {name: [part] if isinstance(part, str) else part, **found.get(key, {})}
    return found
