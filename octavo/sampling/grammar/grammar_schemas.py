"""The JSON schemas in a grammar, which text/grammar/build.py has written there."""

import functools
import json
from typing import Any

Schema = dict[str, Any]


@functools.lru_cache(maxsize=2)
def schemas_of(grammar: str) -> list[Schema]:
    """The schemas in a grammar."""
    found: list[Schema] = []
    at = grammar.find("%json ")
    while at >= 0:
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, at + len("%json "))
        except (ValueError, RecursionError):
            break
        if isinstance(schema, dict):
            found.append(schema)
        at = grammar.find("%json ", end)
    return found


def only_schema(grammar: str) -> Schema | None:
    """The schema of a grammar that is one schema. None: it is not."""
    found = schemas_of(grammar) if "\nstart: %json " in grammar else []
    return found[0] if len(found) == 1 else None
