"""Every field that a dialect's bodies may have, nested ones included, as one tree; and the fields of a body that are not in it.

The tree is built from the JSON schema that the OpenAPI document shows and from the tables in unsupported.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from octavo.server.schema.unsupported import HINTS, LABELS, NOT_OFFERED_WITHIN, WITHOUT_EFFECT, Harmless

MAX_FOUND = 64  # fields of a kind that are listed by name; the rest are counted
MAX_NAME_LEN = 100


@dataclass(slots=True)
class Member:
    """One field of an object. `harmless` None: it is in the schema, or a label; otherwise it is not offered, except with these
    values."""

    harmless: Harmless | None = None
    label: str = ""  # why it is accepted silently
    inside: "Inside | None" = None  # None: its contents are checked elsewhere, or it has none


Members = dict[str, Member]


@dataclass(slots=True)
class Inside:
    """The objects at one place of a body: of one kind, or of several kinds distinguished by a tag."""

    is_list: bool
    tag: str = ""
    kinds: dict[object, Members] = field(default_factory=dict)  # by the tag's value; without a tag under ""
    untagged: Members | None = None  # of an object without the tag; None: the parser of the field refuses it

    def members_of(self, value: Mapping[str, Any]) -> Members | None:
        """None: an unknown kind, which the parser of the field refuses."""
        if not self.tag:
            return self.kinds[""]
        tag = value.get(self.tag)
        if tag is None:
            return self.untagged
        return self.kinds.get(tag) if isinstance(tag, str) else None

    def every_kind(self) -> list[Members]:
        kinds = {id(members): members for members in self.kinds.values()}
        return list(kinds.values())


@dataclass(slots=True)
class UnhonouredField:
    """A field that the tree does not have, or that is not offered."""

    path: str  # tools[0].function.colour
    row: str  # tools[].function.colour
    value: object
    siblings: Members | None = None  # of an unknown field: candidates for a misspelt name


@dataclass(slots=True)
class UnhonouredFields:
    """The fields of one body that have no effect or must be refused."""

    refused: list[UnhonouredField] = field(default_factory=list)
    unknown: list[UnhonouredField] = field(default_factory=list)
    idle: list[UnhonouredField] = field(default_factory=list)  # not offered, and safe to ignore
    num_more: int = 0  # beyond those that are listed

    def add(
        self, kind: list[UnhonouredField], path: str, row: str, value: object, siblings: Members | None = None
    ) -> None:
        if len(kind) < MAX_FOUND:
            kind.append(UnhonouredField(path[:MAX_NAME_LEN], row, value, siblings))
        else:
            self.num_more += 1


# ── building ─────────────────────────────────────────────────────────────────────────────────────────


def build_tree(schema: Mapping[str, Any], not_offered: Mapping[str, Harmless]) -> Inside:
    """Build the tree of one dialect's body."""
    tree = _inside(schema, schema.get("$defs", {}))
    assert tree is not None and not tree.is_list
    for row, harmless in {**NOT_OFFERED_WITHIN, **not_offered}.items():
        for members, name in _places(tree, row):
            members.setdefault(name, Member(harmless))
    for row, why in LABELS.items():
        for members, name in _places(tree, row):
            if name in members or "." in row:
                members.setdefault(name, Member()).label = why
    for row in HINTS:
        for members, name in _places(tree, row):
            members.setdefault(name, Member())
    return tree


def _inside(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Inside | None:
    """None: the schema does not describe its contents."""
    forms = list(_forms(schema, definitions))
    lists = [form["items"] for form in forms if form.get("type") == "array" and isinstance(form.get("items"), dict)]
    if lists:
        objects = [form for items in lists for form in _forms(items, definitions) if "properties" in form]
    else:
        objects = [form for form in forms if "properties" in form]
    if not objects:
        return None
    grown = Inside(is_list=bool(lists))
    if len(objects) == 1:
        grown.kinds[""] = _members(objects[0], definitions)
        return grown
    grown.tag = "type"
    for form in objects:
        members = _members(form, definitions)
        tags = form["properties"][grown.tag]["enum"]
        grown.kinds |= dict.fromkeys(tags, members)
        if grown.tag not in form.get("required", ()):
            grown.untagged = members
    return grown


def _forms(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        for form in schema["anyOf"]:
            yield from _forms(form, definitions)
    else:
        yield schema


def _members(form: Mapping[str, Any], definitions: Mapping[str, Any]) -> Members:
    return {name: Member(inside=_inside(inner, definitions)) for name, inner in form["properties"].items()}


def _places(tree: Inside, row: str) -> Iterator[tuple[Members, str]]:
    """Where a row of a table belongs: every kind of the object that holds its field. Empty: this dialect has no such object."""
    *outer, name = row.split(".")
    places = tree.every_kind()
    for step in outer:
        within = [members[step.removesuffix("[]")].inside for members in places if step.removesuffix("[]") in members]
        places = [
            members
            for inside in within
            if inside is not None and inside.is_list == step.endswith("[]")
            for members in inside.every_kind()
        ]
    for members in places:
        yield members, name


def rows(tree: Inside, above: str = "") -> Iterator[tuple[str, Member]]:
    """Every field by its path, outer ones first."""
    for members in tree.every_kind():
        for name, member in members.items():
            yield above + name, member
            if member.inside is not None:
                yield from rows(member.inside, f"{above}{name}{'[]' if member.inside.is_list else ''}.")


# ── looking ─────────────────────────────────────────────────────────────────────────────────────────


def find_unhonoured(tree: Inside, body: BaseModel) -> UnhonouredFields:
    """Find the fields of a body that are not in the tree, or not offered."""
    found = UnhonouredFields()
    _look_into(tree, body, "", "", found)
    return found


def _look_into(inside: Inside, value: object, path: str, row: str, found: UnhonouredFields) -> None:
    given: Mapping[str, Any]
    if isinstance(value, BaseModel):
        given = {**value.__dict__, **(value.model_extra or {})}
    elif isinstance(value, dict):
        given = value
    else:
        return
    members = inside.members_of(given)
    if members is None:
        return
    at, above = (path + ".", row + ".") if path else ("", "")
    if not given.keys() <= members.keys():
        # Within an object null is the same as absent: client libraries write out every member of an earlier answer.
        unknown = [name for name in given if name not in members and (given[name] is not None or not path)]
        room = MAX_FOUND - len(found.unknown)
        for name in unknown[:room]:
            found.add(found.unknown, at + name, above + name, given[name], members)
        found.num_more += len(unknown[room:])
    for name in given if len(given) < len(members) else members:
        member, inner = members.get(name), given.get(name)
        if member is None or inner is None:
            continue
        if member.harmless is not None:
            if not any(_is_same(inner, same) for same in member.harmless):
                kind = found.idle if above + name in WITHOUT_EFFECT else found.refused
                found.add(kind, at + name, above + name, inner)
        elif member.inside is None:
            continue
        elif not member.inside.is_list:
            _look_into(member.inside, inner, at + name, above + name, found)
        elif isinstance(inner, list):
            for number, entry in enumerate(inner):
                _look_into(member.inside, entry, f"{at}{name}[{number}]", f"{above}{name}[]", found)


def _is_same(value: object, same: object) -> bool:
    """Compare values and types: 0 and false differ in JSON."""
    return type(value) is type(same) and value == same
