"""References: what a $ref in a JSON schema points to, by its URI, its $id, its $anchor or a JSON pointer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from octavo.text.grammar.keywords import LATEST, NOT_DATA, Draft, draft_of

_MAX_URI = 2048  # characters
ROOT = "#"


@dataclass(frozen=True, slots=True)
class At:
    """Where a schema stands."""

    place: str  # JSON pointer from the root, as a fragment
    path: tuple[str | int, ...]  # the same as steps
    base: str  # URI that references in it are relative to
    draft: Draft
    depth: int = 0

    def step(self, *steps: str | int) -> "At":
        place = self.place + "".join(f"/{escaped(str(step))}" for step in steps)
        return At(place, (*self.path, *steps), self.base, self.draft, self.depth + 1)

    def entered(self, schema: Mapping[str, Any]) -> "At":
        """The same place within the schema that stands there, which may have an identifier or a draft of its own."""
        draft = draft_of(schema.get("$schema")) or self.draft
        own = schema.get("id" if draft == 4 else "$id")
        if draft < 2019 and "$ref" in schema:
            own = None  # no effect beside $ref
        base = self.base
        if isinstance(own, str) and len(own) < _MAX_URI and not own.startswith("#"):
            base = _joined(self.base, own)
        return self if base == self.base and draft == self.draft else At(self.place, self.path, base, draft, self.depth)


def start(schema: object) -> At:
    at = At(ROOT, (), "", LATEST)
    return at.entered(schema) if isinstance(schema, Mapping) else at


class References:
    """The identifiers in one document. Nothing outside it is ever read."""

    def __init__(self, root: object, max_depth: int) -> None:
        self._root = root
        self._max_depth = max_depth
        self._resources: dict[str, tuple[Any, At]] = {"": (root, start(root))}
        self._anchors: dict[tuple[str, str], tuple[Any, At]] = {}
        self.dynamic: dict[str, int] = {}  # name of a $dynamicAnchor → how many have it
        self.num_recursive_anchors = 0
        for schema, at in self._walk(root, At(ROOT, (), "", LATEST)):
            self._note(schema, at)

    def find(self, reference: str, at: At) -> tuple[Any, At] | None:
        """The schema that a reference at a place points to, and where it stands. None: there is none in this document."""
        if len(reference) > _MAX_URI:
            return None
        uri, fragment = urldefrag(_joined(at.base, reference))
        bases = [uri.rstrip("#")]
        if reference.startswith("#"):
            bases.append("")  # a schema that was moved into another keeps its $id, and its references lead to the whole
        for base in bases:
            if base in self._resources and (found := self._within(base, unquote(fragment))) is not None:
                return found
        return None

    def _within(self, base: str, fragment: str) -> tuple[Any, At] | None:
        value, at = self._resources[base]
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((base, fragment))
        for step in fragment.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and step in value:
                value, at = value[step], at.step(step)
            elif isinstance(value, list) and step.isascii() and step.isdecimal() and int(step[:9]) < len(value):
                value, at = value[int(step)], at.step(int(step))
            else:
                return None
            if isinstance(value, Mapping):
                at = at.entered(value)
        return value, at

    def _note(self, schema: Mapping[str, Any], at: At) -> None:
        if at.base:
            self._resources.setdefault(at.base.rstrip("#"), (schema, at))
        own = schema.get("id" if at.draft == 4 else "$id")
        for name in (
            schema.get("$anchor"),
            schema.get("$dynamicAnchor"),
            own[1:] if isinstance(own, str) and own[:1] == "#" else None,
        ):
            if isinstance(name, str) and name:
                self._anchors.setdefault((at.base.rstrip("#"), name), (schema, at))
        if isinstance(name := schema.get("$dynamicAnchor"), str):
            self.dynamic[name] = self.dynamic.get(name, 0) + 1
        self.num_recursive_anchors += schema.get("$recursiveAnchor") is True

    def _walk(self, value: object, at: At) -> Iterator[tuple[Mapping[str, Any], At]]:
        """Every object that may be a schema, outermost first."""
        waiting = [(value, at)]
        while waiting:
            value, at = waiting.pop()
            if at.depth > 4 * self._max_depth:
                continue  # lower.py refuses what is nested so deeply
            if isinstance(value, Mapping):
                at = at.entered(value)
                yield value, at
                waiting += [
                    (part, at.step(key))
                    for key, part in reversed(list(value.items()))
                    if key not in NOT_DATA and isinstance(part, Mapping | list)
                ]
            elif isinstance(value, list):
                waiting += [
                    (part, at.step(number)) for number, part in enumerate(value) if isinstance(part, Mapping | list)
                ]


def _joined(base: str, reference: str) -> str:
    try:
        if base.startswith("urn:") and reference.startswith("#"):
            return base.partition("#")[0] + reference
        return urljoin(base, reference)
    except ValueError:  # no URI
        return reference


def escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def unescaped(name: str) -> str:
    return name.replace("~1", "/").replace("~0", "~")
