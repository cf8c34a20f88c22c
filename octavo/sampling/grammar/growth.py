"""How far an answer's end may move away by one token: the tokens that the largest part of a schema requires once it is begun."""

import json
from typing import Any

from octavo.sampling.grammar.grammar_schemas import schemas_of
from octavo.sampling.grammar.proposals import Spell, tokens_per_character

MOST = 400  # tokens; a larger part is not waited for
_ROUNDS = 12  # of references that lead to each other
_PER_CHARACTER = 0.6  # tokens at least: names and brackets of JSON have fewer than one each
_PATTERN = 24  # characters of a string that has a pattern
_FORMAT = 40


def growth_of_grammar(grammar: str, spell: Spell) -> int:
    """An estimate in tokens, from the schemas in a grammar. 0: it has none."""
    most = max((_Sizes(schema).most() for schema in schemas_of(grammar)), default=0.0)
    if not most:
        return 0
    return min(MOST, int(max(_PER_CHARACTER, tokens_per_character(grammar, spell)) * most))


class _Sizes:
    """Characters that the values of schemas have at least, whichever alternatives are chosen."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._defs: dict[str, Any] = root.get("$defs", {}) if isinstance(root, dict) else {}
        self._known = dict.fromkeys(self._defs, 2.0)
        self._most = 0.0
        self._num_referred = 0

    def most(self) -> float:
        for _ in range(_ROUNDS):
            before, self._num_referred = dict(self._known), 0
            for name, part in self._defs.items():
                self._known[name] = min(self._of(part), MOST / _PER_CHARACTER)
            if before == self._known or not self._num_referred:
                break
        if isinstance(self._root, dict):
            parts = {key: part for key, part in self._root.items() if key != "$defs"}
            self._of(parts, is_whole=True)
        return self._most

    def _of(self, schema: Any, *, is_whole: bool = False) -> float:
        """`is_whole`: of the answer, which is begun before anything is counted, so that its own size does not count."""
        if not isinstance(schema, dict):
            return 1
        size = self._own(schema)
        for part in (*schema.get("allOf", ()), *schema.get("anyOf", ())):
            size = max(size, self._of(part, is_whole=is_whole and "anyOf" not in schema))
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/$defs/"):
            self._num_referred += 1
            size = max(
                size, self._known.get(reference[8:].replace("%23", "#").replace("~1", "/").replace("~0", "~"), 2)
            )
        if not is_whole:
            self._most = max(self._most, size)
        return size

    def _own(self, schema: dict[str, Any]) -> float:
        if "const" in schema:
            return _size(schema["const"])
        if "enum" in schema:
            return max(_size(value) for value in schema["enum"])
        size = 2.0 + schema.get("minLength", 0)
        if "pattern" in schema or "format" in schema:
            size += _FORMAT if "format" in schema else _PATTERN
        properties = schema.get("properties", {})
        sizes = {name: self._of(part) for name, part in properties.items()}
        self._most = max(
            [self._most, *(len(name) + 4 + value for name, value in sizes.items())]
        )  # one that is optional
        for part in (*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")):
            self._of(part)
        size += sum(len(name) + 4 + sizes.get(name, 2) for name in schema.get("required", ()))
        prefix = [self._of(part) for part in schema.get("prefixItems", ())]
        item, least = self._of(schema.get("items")), schema.get("minItems", 0)
        return float(size + sum(prefix[:least]) + max(0, least - len(prefix)) * (item + 1))


def _size(value: Any) -> int:
    """Characters of a value as JSON, about: without escapes."""
    return len(value) + 2 if isinstance(value, str) else len(json.dumps(value))
