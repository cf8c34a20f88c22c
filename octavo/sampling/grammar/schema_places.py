"""Places: which parts of a schema may apply to a value, by the names and positions that lead to it in an answer.

Only arrays whose items must differ are looked for. Where a value has alternatives (`anyOf`), all of them count, because it may be any
until it is complete: items differ where at least one of them asks for it."""

import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from octavo.text.grammar.keywords import UNIQUE

_SAME_VALUE = ("allOf", "anyOf")
_FREE_KEYS = {"type", "minLength"}
_MAX_VALUES = 1000  # integers of a range that are listed

Node = dict[str, Any]


class Place:
    """The schemas of one value. Children are made when they are first asked for; there are as many as the schema has."""

    __slots__ = ("_by_index", "_by_name", "_nodes", "_others", "_places", "is_free", "is_unique", "values")

    def __init__(self, places: "Places", nodes: list[Node]) -> None:
        self._places, self._nodes = places, nodes
        self._by_name: dict[str, Place | None] = {}
        self._others: list[Place | None] = []  # of names that no schema lists; empty: not asked for yet
        self._by_index: list[Place | None] = []
        self.is_unique = any(node.get("$comment") == UNIQUE for node in nodes)
        items = self._only_items() if self.is_unique else None
        # Every beginning of an item can be continued to one that differs from all others.
        self.is_free = items is not None and items.get("type") == "string" and not items.keys() - _FREE_KEYS
        self.values = None if items is None else _values(items)  # all that an item may have, as JSON; None: others too

    def property(self, name: str) -> "Place | None":
        """The place of a property's value. None: nothing below it is looked for."""
        if name not in self._by_name:
            if not any(name in node.get("properties", ()) for node in self._nodes):
                if not self._others:
                    self._others = [self._places.of(self._properties(name))]
                return self._others[0]
            self._by_name[name] = self._places.of(self._properties(name))
        return self._by_name[name]

    def item(self, index: int) -> "Place | None":
        if not self._by_index:
            longest = max(len(node.get("prefixItems", ())) for node in self._nodes)
            self._by_index = [self._places.of(self._items(at)) for at in range(longest + 1)]
        return self._by_index[min(index, len(self._by_index) - 1)]

    def _properties(self, name: str) -> Iterator[object]:
        for node in self._nodes:
            listed = node.get("properties", {})
            yield from node.get("patternProperties", {}).values()  # it may match any name
            yield listed[name] if name in listed else node.get("additionalProperties")

    def _items(self, index: int) -> Iterator[object]:
        for node in self._nodes:
            first = node.get("prefixItems", ())
            yield first[index] if index < len(first) else node.get("items")

    def _only_items(self) -> Node | None:
        """The only schema that applies to the items. None: there are several, or items have schemas of their own."""
        found: list[object] = []
        for node in self._nodes:
            if node.keys() & {"prefixItems", "enum", "const"}:
                return None
            found += [node["items"]] if "items" in node else []
        items = [*self._places.same_value(found)]
        return items[0] if len(found) == len(items) == 1 and items[0] is found[0] else self._referred(found, items)

    def _referred(self, found: list[object], items: list[Node]) -> Node | None:
        """The schema that a plain reference leads to."""
        is_plain = len(found) == 1 and isinstance(found[0], dict) and [*found[0]] == ["$ref"]
        return items[0] if is_plain and len(items) == 1 and not items[0].keys() & {"allOf", "anyOf", "$ref"} else None


def _values(schema: Node) -> tuple[bytes, ...] | None:
    """All values of a schema of few scalars, as JSON, sorted. None: there are more, or others."""
    match schema:
        case {"enum": list(values), **rest} if not rest:
            pass
        case {"const": value, **rest} if not rest:
            values = [value]
        case {"type": "string", "enum": list(values), **rest} if not rest:
            values = [value for value in values if isinstance(value, str)]
        case {"type": "boolean", **rest} if not rest:
            values = [True, False]
        case {"type": "integer", "minimum": int(least), "maximum": int(most), **rest} if not rest:
            if most - least >= _MAX_VALUES:
                return None
            values = [*range(least, most + 1)]
        case _:
            return None
    if any(isinstance(value, list | dict | float) for value in values):
        return None
    return tuple(sorted({json.dumps(value, ensure_ascii=False).encode() for value in values}))


class Places:
    def __init__(self, root: Node) -> None:
        self._root = root
        self._defs: dict[str, Any] = root.get("$defs", {})
        self._leading = self._lead_to_unique()
        self._known: dict[tuple[int, ...], Place | None] = {}

    def root(self) -> Place | None:
        """None: no array's items must differ."""
        return self.of([self._root])

    def of(self, schemas: Iterable[object]) -> Place | None:
        nodes = [*self.same_value(schemas)]
        key = tuple(map(id, nodes))
        if key not in self._known:
            leads = any(id(node) in self._leading for node in nodes)
            self._known[key] = Place(self, nodes) if leads else None
        return self._known[key]

    def same_value(self, schemas: Iterable[object]) -> Iterator[Node]:
        """All schemas that may apply to the value to which these do."""
        waiting, seen = [*schemas], set[int]()
        while waiting:
            node = waiting.pop()
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            if node.keys() - {"allOf", "anyOf", "$ref", "$defs"}:
                yield node
            for key in _SAME_VALUE:
                waiting += node.get(key, ())
            if "$ref" in node:
                waiting.append(self._target(node["$ref"]))

    def _target(self, reference: str) -> object:
        if reference == "#":
            return self._root
        name = unquote(reference.removeprefix("#/$defs/"))
        return self._defs.get(name.replace("~1", "/").replace("~0", "~"))

    def _lead_to_unique(self) -> set[int]:
        """Ids of the schemas that are, or hold, an array whose items must differ."""
        holders: defaultdict[int, list[int]] = defaultdict(list)
        found: list[int] = []
        waiting: list[Node] = [self._root]
        seen = {id(self._root)}
        while waiting:
            node = waiting.pop()
            if node.get("$comment") == UNIQUE:
                found.append(id(node))
            for part in self._parts(node):
                holders[id(part)].append(id(node))
                if id(part) not in seen:
                    seen.add(id(part))
                    waiting.append(part)
        leading = set(found)
        while found:
            for holder in holders[found.pop()]:
                if holder not in leading:
                    leading.add(holder)
                    found.append(holder)
        return leading

    def _parts(self, node: Node) -> Iterator[Node]:
        parts: list[object] = [node.get("items"), node.get("additionalProperties")]
        for key in ("allOf", "anyOf", "prefixItems"):
            parts += node.get(key, ())
        for key in ("properties", "patternProperties"):
            parts += node.get(key, {}).values()
        if "$ref" in node:
            parts.append(self._target(node["$ref"]))
        return (part for part in parts if isinstance(part, dict))


class Framed(NamedTuple):
    """A schema of a grammar, and what stands before and after it in an answer: texts, and control
    tokens by id."""

    before: list[str | int]
    schema: Node
    after: list[str | int]
    trigger: str = ""  # of a tag in a text; empty: there are none


def marked_schemas(grammar: str) -> list[Framed]:
    """The schemas of a grammar, if items of arrays must differ in one of them: one, or those of all its tags. Empty: they need not."""
    if f'"$comment": "{UNIQUE}"' not in grammar:
        return []
    triggers = dict(_TRIGGER.findall(grammar))
    if triggers:
        found = [
            _schema_at(grammar, tag.end(), json.loads(triggers[tag["name"]]))
            for tag in _TAG.finditer(grammar)
            if tag["name"] in triggers
        ]
    else:
        framed = framed_schema(grammar)
        assert framed is not None, "such schemas are in grammars of these forms"
        found = [framed]
    return found if any(Places(one.schema).root() is not None for one in found) else []


@functools.lru_cache(maxsize=2)
def framed_schema(grammar: str) -> Framed | None:
    """The schema of a grammar that is one, with texts before and after it or without (text/grammar/build.py). None: it is not."""
    rule = "\npart: " if "\nstart: part" in grammar else "\nstart: "
    at = grammar.find(rule)
    try:
        return _schema_at(grammar, at + len(rule)) if at >= 0 else None
    except (ValueError, RecursionError):  # a text of a client's own grammar
        return None


def _schema_at(grammar: str, at: int, trigger: str = "") -> Framed:
    """The schema of a rule, whose expression begins at `at`. Raises ValueError where it is not one."""
    before, at = _literals(grammar, at)
    if not grammar.startswith("%json ", at):
        raise ValueError("it does not begin with a schema")
    schema, at = json.JSONDecoder().raw_decode(grammar, at + len("%json "))
    after, _ = _literals(grammar, at + 1)
    return Framed(before, schema, after, trigger)


# As text/grammar/structural_tag.py writes them.
_TRIGGER = re.compile(r'^(?P<name>tag_[0-9]+)_head\[lazy\]: TAG_TEXT (?P<text>"(?:[^"\\]|\\.)*")$', re.M)
_TAG = re.compile(r"^(?P<name>tag_[0-9]+): tag_[0-9]+_head +", re.M)


def _literals(grammar: str, at: int) -> tuple[list[str | int], int]:
    """Texts and control tokens of a rule (text/grammar/build.py), from `at` on."""
    found: list[str | int] = []
    while True:
        if grammar.startswith('"', at):
            text, at = json.JSONDecoder().raw_decode(grammar, at)
            found.append(text)
        elif grammar.startswith("<[", at):
            end = grammar.index("]>", at)
            found.append(int(grammar[at + 2 : end]))
            at = end + 2
        else:
            return found, at
        at += grammar.startswith(" ", at)
