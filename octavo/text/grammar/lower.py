"""Lowers a JSON schema of any draft to the keywords that the grammar compiler enforces: older spellings become the newer ones,
references become references to $defs, annotations are left out and noted, and constraints such as `not`, `if` or `dependentRequired`
are rewritten as unions, where that is exact. A constraint for which it is not is refused, or left out and noted where the answer is to
be checked."""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import Field, InvalidRequest, Unsupported
from octavo.text.grammar.contains import MAX_POSITIONS, contains_cases
from octavo.text.grammar.disjoint import Said, all_differ, outline, property_names, shape_of
from octavo.text.grammar.keywords import (
    APPLIES_TO,
    BY_NAME,
    FORMATS,
    IDENTITY,
    LAST_WITHOUT_SIBLINGS,
    LISTS,
    NEVER,
    PLAIN,
    REWRITTEN,
    SINGLES,
    Draft,
)
from octavo.text.grammar.names import NamesUnknown, allowed_names
from octavo.text.grammar.negate import TYPES, CannotNegate, any_of, negated, types_of
from octavo.text.grammar.references import ROOT, At, References, escaped, start
from octavo.text.grammar.shapes import wrong_shape
from octavo.text.grammar.switches import Test, switch_of

Schema = dict[str, Any]

MAX_DEPTH = 64  # nested schemas
MAX_NODES = 20_000
MAX_NOTED = 64  # paths of annotations: as many as an answer lists
_MAX_OPEN = 50  # definitions that are being lowered at once, because each needs the next
_MAX_CASES = 64  # unions of one schema, multiplied
_MAX_EXCLUSIVE = 6  # alternatives of oneOf that are kept apart by negation
_MAX_UNIQUE = 5  # values whose sequences without repetition are listed
_MAX_TAGS = 16  # properties that are tried, of which one may distinguish the alternatives of oneOf
DEFS = "#/$defs/"
# Keywords that allow more than others would without them: the first draft in which they mean anything.
_SINCE: dict[str, Draft] = {"prefixItems": 2020, "minContains": 2019}


# Keywords that evaluate properties in a way that the lowered schema does not show.
_OPAQUE = frozenset({
    "unevaluatedProperties", "if", "anyOf", "oneOf", "dependentSchemas", "dependencies", "propertyNames", "$dynamicRef", "$recursiveRef",
})  # fmt: skip


class Unenforced(Exception):
    """A constraint that cannot be enforced: its place, its keyword, and why."""

    def __init__(self, place: str, keyword: str, why: str = "") -> None:
        super().__init__(f"{keyword!r} (at {place})")
        self.why = f" ({why})" if why else ""


@dataclass(slots=True)
class Lowered:
    schema: Any
    ignored: list[tuple[str | int, ...]] = field(default_factory=list)  # paths of annotations, at most MAX_NOTED
    num_ignored: int = 0
    unenforced: list[str] = field(default_factory=list)  # constraints that were left out: 'keyword' (at place)


def lower(
    schema: object, where: Field, *, may_leave_out: bool = False, is_followed: bool = False, can_check: bool = True
) -> Lowered:
    """`may_leave_out`: note constraints that cannot be enforced instead of refusing them. `is_followed`: keep uniqueItems. `can_check`:
    a request may ask for that."""
    return _Lowering(schema, where, may_leave_out, is_followed, can_check).run()


class _Lowering:
    def __init__(self, root: object, where: Field, may_leave_out: bool, is_followed: bool, can_check: bool) -> None:
        self._root, self._field = root, where
        self._may_leave_out, self._is_followed, self._can_check = may_leave_out, is_followed, can_check
        self._references = References(root, MAX_DEPTH)
        self._found = Lowered(None)
        self._num_nodes = 0
        self._waiting: dict[str, tuple[Any, At]] = {}  # name of a definition → its schema, to be lowered
        self._defs: dict[str, Any] = {}  # name → lowered
        self._open: dict[str, Any] = {}  # names that are being lowered → their schemas as they were given
        self._opaque: set[int] = set()  # ids of lowered schemas that do not tell which properties they evaluate
        # Definitions that allow more than they say, because something was left out, or less: their opposite is not known.
        self._weak: set[str] = set()
        self._num_narrowed = 0  # schemas that allow less than they say: their opposite would allow what they do not
        self._num_strict = 0  # constraints around, within which nothing may be left out

    def run(self) -> Lowered:
        lowered = self._schema(self._root, start(self._root))
        while self._waiting:
            self._define(next(iter(self._waiting)))
        if self._defs and isinstance(lowered, dict):
            lowered["$defs"] = self._defs
        self._found.schema = lowered
        return self._found

    # ── one schema ──

    def _schema(self, value: object, at: At) -> Schema | bool:
        self._num_nodes += 1
        if at.depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise InvalidRequest(
                self._field
                + f" is too large: at most {MAX_DEPTH} levels of schemas and {MAX_NODES} schemas in total are allowed"
            )
        if isinstance(value, bool):
            return value
        if not isinstance(value, Mapping):
            raise self._invalid(at.place, "must be a schema: an object, true or false")
        at = at.entered(value)
        given = self._translated(value, at)
        for key, part in given.items():
            self._check_shape(key, part, at)
        if "$ref" in given and at.draft <= LAST_WITHOUT_SIBLINGS:
            for key in given:
                if key not in ("$ref", *IDENTITY, "$id", "id"):
                    self._note(at, key)
            given = {"$ref": given["$ref"]}
        core: Schema = {}
        more: list[Schema | bool] = []  # further schemas that apply to the same value
        tests = switch_of(given.get("allOf"))
        if tests:
            given = {**given, "allOf": [True if at in tests else part for at, part in enumerate(given["allOf"])]}
        for key, part in given.items():
            if key in PLAIN:
                core[key] = part
            elif key in BY_NAME or key in LISTS or key in SINGLES:
                core[key] = self._inner(key, part, at)
            elif key in NEVER:
                self._leave_out(Unenforced(at.place, key))
            elif key == "$ref":
                core[key] = self._reference(part, at)
            elif key not in REWRITTEN and key not in IDENTITY:
                self._note(at, key)
        if tests:
            core["allOf"] = [part for part in core["allOf"] if part is not True]
            try:
                core["allOf"] += self._switch(tests, core, at)
            except Unenforced as error:
                self._leave_out(error)
        for key in given:
            if key in REWRITTEN and key != "$ref":
                try:
                    self._rewrite(key, given, core, more, at)
                except Unenforced as error:
                    self._leave_out(error)
        for key, limit in (("minProperties", self._min_properties), ("maxProperties", self._max_properties)):
            try:
                limit(core, more, at)
            except Unenforced as error:
                del core[key]
                self._leave_out(error)
        if not _OPAQUE.isdisjoint(value):
            self._opaque.add(id(core))
        if more:
            own = core.get("allOf")
            core["allOf"] = [*(own if isinstance(own, list) else []), *more]
            self._check_cases(core, at)
        return core

    def _translated(self, schema: Mapping[str, Any], at: At) -> dict[str, Any]:
        """Older spellings as newer ones; keywords that say nothing are dropped."""
        found = dict(schema)
        for key, first in _SINCE.items():
            if key in found and at.draft < first:
                del found[key]
                self._note(at, key)
        if isinstance(found.get("items"), list):
            found["prefixItems"] = found.pop("items")
            if "additionalItems" in found:
                found["items"] = found.pop("additionalItems")
            if not found["prefixItems"]:
                del found["prefixItems"]
        for inclusive, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and inclusive in found:
                found[exclusive] = found.pop(inclusive)
        if "nullable" in found:
            is_nullable, types = found.pop("nullable"), found.get("type")
            if is_nullable is True and types is not None:
                self._check_shape("type", types, at)
                found["type"] = list(dict.fromkeys([*([types] if isinstance(types, str) else types), "null"]))
            elif is_nullable is not False:
                self._note(at, "nullable")  # no effect without a type
        if "dependencies" in found:
            dependencies = found.pop("dependencies")
            self._check_shape("dependencies", dependencies, at)
            names = {
                key: [part] if isinstance(part, str) else part
                for key, part in dependencies.items()
                if isinstance(part, list | str)
            }
            schemas = {key: part for key, part in dependencies.items() if not isinstance(part, list | str)}
            for key, parts in (("dependentRequired", names), ("dependentSchemas", schemas)):
                if parts:
                    self._check_shape(key, found.get(key, {}), at)
                    found[key] = {**parts, **found.get(key, {})}
        if isinstance(found.get("required"), bool) and not found.pop("required"):  # draft 3's, of a property
            self._note(at, "required")
        if isinstance(listed := found.get("properties"), Mapping):
            marked = [
                name for name, part in listed.items() if isinstance(part, Mapping) and part.get("required") is True
            ]
            if marked:
                self._check_shape("required", found.get("required", []), at)
                found["required"] = list(dict.fromkeys([*found.get("required", []), *marked]))
        for key, nothing in (
            ("uniqueItems", False),
            ("patternProperties", {}),
            ("unevaluatedProperties", True),
            ("unevaluatedItems", True),
        ):
            if key in found and found[key] == nothing:
                del found[key]
        return found

    def _inner(self, key: str, part: Any, at: At) -> Any:
        """The schemas in a keyword."""
        if key in BY_NAME:
            return {name: self._schema(inner, at.step(key, name)) for name, inner in part.items()}
        if key in LISTS:
            return [self._schema(inner, at.step(key, number)) for number, inner in enumerate(part)]
        return self._schema(part, at.step(key))

    # ── references ──

    def _reference(self, wanted: str, at: At) -> str:
        found = self._references.find(wanted, at)
        if found is None:
            why = "does not exist in this schema" if wanted.startswith("#") else "points outside this schema"
            raise InvalidRequest(self._field + f": $ref {wanted[:80]!r} (at {at.place}) {why}")
        target, there = found
        if there.place == ROOT:
            return ROOT
        if there.place not in self._defs and there.place not in self._open:
            self._waiting.setdefault(there.place, (target, there))
        return DEFS + escaped(there.place)

    def _define(self, name: str) -> None:
        target, at = self._waiting.pop(name)
        self._open[name] = target
        num_strict, self._num_strict = self._num_strict, 0
        num_inexact = self._num_inexact
        self._defs[name] = self._schema(target, At(at.place, at.path, at.base, at.draft))
        if self._num_inexact > num_inexact:
            self._weak.add(name)
        self._num_strict = num_strict
        del self._open[name]

    @property
    def _num_inexact(self) -> int:
        return len(self._found.unenforced) + self._num_narrowed

    def _resolve(self, reference: str) -> Schema | bool:
        """The lowered schema of a reference that was made by _reference()."""
        name = _name_of(reference)
        if name in self._waiting:
            if len(self._open) >= _MAX_OPEN:
                raise InvalidRequest(
                    self._field + f" has a chain of more than {_MAX_OPEN} references through oneOf, not or if"
                )
            self._define(name)
        if name not in self._defs or name in self._weak:
            raise CannotNegate("$ref")
        found: Schema | bool = self._defs[name]
        return found

    # ── constraints that are rewritten ──

    def _rewrite(self, key: str, given: dict[str, Any], core: Schema, more: list[Schema | bool], at: At) -> None:
        """Express a constraint by others, in `core` or as a further schema. Raises Unenforced."""
        value, here = given[key], at.step(key)
        kind = APPLIES_TO.get(key)
        if kind is not None and kind not in types_of(core):
            self._note(at, key)
            return
        try:
            match key:
                case "format":
                    self._format(value, core, at)
                case "not":
                    more.append(self._negated(self._strictly(value, here), core))
                case "if":
                    self._condition(given, core, more, at)
                case "then" | "else" if "if" not in given:
                    self._note(at, key)
                case "oneOf":
                    self._one_of(given, core, more, at)
                case "dependentRequired" | "dependentSchemas":
                    self._dependent(key, value, more, here)
                case "propertyNames":
                    self._property_names(self._strictly(value, here), core)
                case "uniqueItems":
                    self._unique(core, at)
                case "contains":
                    self._contains(given, core, more, at)
                case "minContains" | "maxContains" if "contains" not in given:
                    self._note(at, key)
                case "unevaluatedProperties":
                    self._unevaluated(given, core, more, at)
                case "unevaluatedItems":
                    self._unevaluated_items(given, core, at)
                case "additionalItems":
                    self._note(at, key)  # no effect where items is no list
                case "$dynamicRef" | "$recursiveRef":
                    self._dynamic_reference(key, value, core, more, at)
        except CannotNegate as error:
            raise Unenforced(at.place, key, f"the opposite of {error} is not known") from None
        except NamesUnknown as error:
            raise Unenforced(at.place, key, str(error)) from None

    def _strictly(self, value: Any, at: At) -> Schema | bool:
        """Lower a schema of which nothing may be left out, because it is negated or decides what else applies."""
        self._num_strict += 1
        try:
            return self._schema(value, at)
        finally:
            self._num_strict -= 1

    def _negated(self, schema: Schema | bool, core: Schema) -> Schema | bool:
        return any_of(negated(schema, types_of(core), self._resolve))

    def _format(self, value: object, core: Schema, at: At) -> None:
        if isinstance(value, str) and value in FORMATS and "string" in types_of(core):
            core["format"] = value
        else:
            self._note(at, "format")

    def _condition(self, given: dict[str, Any], core: Schema, more: list[Schema | bool], at: At) -> None:
        if "then" not in given and "else" not in given:
            self._note(at, "if")
            return
        condition = self._strictly(given["if"], at.step("if"))
        then, otherwise = (self._strictly(given.get(key, True), at.step(key)) for key in ("then", "else"))
        opposite = self._negated(condition, core)
        cases = [
            {"allOf": [one, other]}
            for one, other in ((condition, then), (opposite, otherwise))
            if False not in (one, other)
        ]
        more.append(any_of([*cases]))

    def _switch(self, tests: Mapping[int, Test], core: Schema, at: At) -> list[Schema | bool]:
        """Conditions that compare one property with values: a case for each kind of value, instead of a union for each condition. The
        compiler looks at all combinations of unions."""
        name = next(iter(tests.values())).name
        said: list[Said] = [(core.get("properties", {}).get(name, True), True)]
        values = shape_of(said, self._follow).values
        cases: dict[tuple[bool, ...], list[Any]] = {}
        for value in values or ():
            cases.setdefault(tuple(test.has(value) for test in tests.values()), []).append(value)
        if values is None or len(cases) > _MAX_CASES or types_of(core) != ["object"]:
            return [self._schema(test.given, at.step("allOf", number)) for number, test in tests.items()]
        branches = {
            (number, is_met): self._strictly(
                test.branch(is_met), at.step("allOf", number, "then" if is_met else "else")
            )
            for number, test in tests.items()
            for is_met in (True, False)
        }

        def case(is_met: Sequence[bool], part: Schema | bool, required: list[str]) -> list[Schema]:
            chosen = [branches[key] for key in zip(tests, is_met, strict=True)]
            if False in chosen:
                return []
            parts = [one for one in chosen if one is not True and one != {}]
            return [{"properties": {name: part}, "required": required, **({"allOf": parts} if parts else {})}]

        found = [one for is_met, listed in cases.items() for one in case(is_met, {"enum": listed}, [name])]
        if name not in core.get("required", ()):
            found += case([not test.needs_name for test in tests.values()], False, [])
        return [any_of(found)]

    def _dependent(self, key: str, value: Mapping[str, Any], more: list[Schema | bool], at: At) -> None:
        for name, part in value.items():
            if key == "dependentSchemas":
                then = self._strictly(_where_there(part, name), at.step(name))
                is_there: Schema | bool = (
                    {"allOf": [{"type": "object", "required": [name]}, then]} if then is not False else False
                )
            else:
                if not isinstance(part, list) or not all(isinstance(other, str) for other in part):
                    raise self._invalid(f"{at.place}/{escaped(name)}", "must be a list of strings")
                if not part:
                    continue
                is_there = {"type": "object", "required": list(dict.fromkeys([name, *part]))}
            more.append(any_of([{"properties": {name: False}}, *([is_there] if isinstance(is_there, dict) else [])]))

    def _one_of(self, given: dict[str, Any], core: Schema, more: list[Schema | bool], at: At) -> None:
        """oneOf becomes anyOf if no value can satisfy two alternatives, or with the opposite of the others added to each, or with a
        property that distinguishes them required in each."""
        num_inexact = self._num_inexact
        parts = [self._schema(part, at.step("oneOf", number)) for number, part in enumerate(given["oneOf"])]
        parts = [part for part in parts if part is not False]
        is_exact = self._num_inexact == num_inexact
        said: list[list[Said]] = [[(part, is_exact), (core, True)] for part in parts]
        if not parts:
            more.append(False)
        elif all_differ([shape_of(one, self._follow) for one in said]):
            more.append(any_of([part if isinstance(part, dict) else {} for part in parts]))
        else:
            try:
                more.append(self._exclusive(parts, core, is_exact, at))
            except (CannotNegate, Unenforced):
                tag = None if self._num_strict else self._tag(said, given.get("discriminator"))
                if tag is None:
                    raise
                self._num_narrowed += 1
                more.append(any_of([{"allOf": [part, tag]} for part in parts]))

    def _exclusive(self, parts: list[Schema | bool], core: Schema, is_exact: bool, at: At) -> Schema | bool:
        """Alternatives, each with the opposite of the others."""
        if len(parts) > _MAX_EXCLUSIVE:
            raise Unenforced(at.place, "oneOf", f"more than {_MAX_EXCLUSIVE} alternatives overlap")
        if not is_exact:
            raise Unenforced(at.place, "oneOf", "a part of it cannot be enforced exactly")
        opposites = [self._negated(part, core) for part in parts]
        cases: list[Schema] = []
        for number, part in enumerate(parts):
            others = [opposite for other, opposite in enumerate(opposites) if other != number]
            if False not in others:
                cases.append({"allOf": [part, *others]})
        return any_of(cases)

    def _tag(self, said: Sequence[Sequence[Said]], discriminator: object) -> Schema | None:
        """What distinguishes alternatives where it is there: a property, or the first item of arrays, as a schema that requires it. None:
        nothing does. Such a property often has a default, and so is not required (Pydantic)."""
        every = [property_names(one, self._follow) for one in said]
        named = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        shared = sorted(
            {name: None for names in every for name in names},
            key=lambda name: (name != named, -sum(name in names for names in every)),
        )
        tags: list[Schema] = [{"required": [name]} for name in shared[:_MAX_TAGS]]
        for tag in (*tags, {"minItems": 1}, *({**tag, "minItems": 1} for tag in tags)):
            shapes = [shape_of([*one, (tag, True)], self._follow) for one in said]
            if all_differ(shapes) and not any(shape.lacks(shape.required) for shape in shapes):
                return tag
        return None

    def _follow(self, reference: str) -> Said:
        """The definition of a reference that was made by _reference(), as far as it is lowered."""
        name = _name_of(reference)
        if reference == ROOT:
            return outline(self._root), True
        with contextlib.suppress(CannotNegate):
            self._resolve(reference)
        if name in self._open:
            return outline(self._open[name]), True
        return self._defs.get(name, True), name not in self._weak

    def _min_properties(self, core: Schema, more: list[Schema | bool], at: At) -> None:
        """More properties than are required: a choice of which of the listed ones these are."""
        least, required = core.get("minProperties", 0), {*core.get("required", ())}
        missing = int(least) - len(required)
        if missing <= 0 or "object" not in types_of(core):
            return
        listed = [
            name for name, part in core.get("properties", {}).items() if part is not False and name not in required
        ]
        if least == 1 and (self._num_strict or not 1 <= len(listed) <= _MAX_CASES):
            return  # enforced as it is, if no property is listed
        is_cut = math.comb(len(listed), missing) > _MAX_CASES
        if is_cut and not self._num_strict:  # a choice among the first of them
            listed = listed[: max(num for num in range(missing, len(listed)) if math.comb(num, missing) <= _MAX_CASES)]
        if not 1 <= math.comb(len(listed), missing) <= _MAX_CASES:
            raise Unenforced(
                at.place, "minProperties", "enforced up to 1, and for a choice among few listed properties"
            )
        if is_cut or core.get("additionalProperties", True) is not False or "patternProperties" in core:
            if self._num_strict:
                raise Unenforced(at.place, "minProperties", "in a condition it is enforced up to 1")
            self._num_narrowed += 1
        del core["minProperties"]
        others = [name for name in types_of(core) if name != "object"]
        choices: list[Schema] = [{"required": list(names)} for names in itertools.combinations(listed, missing)]
        more.append(any_of([*([{"type": others}] if others else []), *choices]))

    def _max_properties(self, core: Schema, more: list[Schema | bool], at: At) -> None:
        """Fewer properties than are listed: a choice of which of those that are not required may come. The compiler counts properties
        only where all that are listed are required."""
        most, required = core.get("maxProperties"), {*core.get("required", ())}
        optional = [
            name for name, part in core.get("properties", {}).items() if part is not False and name not in required
        ]
        if most is None or not optional or "object" not in types_of(core):
            return
        is_closed = core.get("additionalProperties", True) is False and "patternProperties" not in core
        room = max(0, int(most) - len(required))
        if not is_closed or math.comb(len(optional), room) > _MAX_CASES:
            if self._num_strict:
                raise Unenforced(at.place, "maxProperties", "in a condition it is enforced for few listed properties")
            self._num_narrowed += 1
        del core["maxProperties"]
        if len(required) > most:
            more.append(any_of([{"type": name} for name in types_of(core) if name != "object"]))
            return
        if not is_closed:
            more.append(
                {
                    "properties": dict.fromkeys(core["properties"], True) | dict.fromkeys(required, True),
                    "additionalProperties": False,
                }
            )
        if room >= len(optional):
            return
        num = max(num for num in range(room, len(optional) + 1) if math.comb(num, room) <= _MAX_CASES)
        kept = itertools.combinations(optional[:num], room)
        more.append(any_of([{"properties": {name: False for name in optional if name not in names}} for names in kept]))

    def _property_names(self, names: Schema | bool, core: Schema) -> None:
        allowed = allowed_names(names, self._resolve)
        if allowed.is_any:
            return
        parts = core.get("properties", {})
        patterns, additional = core.get("patternProperties", {}), core.get("additionalProperties", True)
        kept = {name: part if allowed.has(name) else False for name, part in parts.items()}
        if allowed.listed is not None:
            if patterns:
                raise NamesUnknown("beside patternProperties")
            kept |= {name: additional for name in allowed.listed if name not in kept}
            core["additionalProperties"] = False
        elif additional is not False or patterns:
            if patterns or (
                additional is not True and additional != {} and any(part is not False for part in kept.values())
            ):
                raise NamesUnknown("beside patternProperties or additionalProperties")
            core["patternProperties"] = {allowed.pattern: additional}
            core["additionalProperties"] = False
        if kept:
            core["properties"] = kept

    def _unique(self, core: Schema, at: At) -> None:
        """Sequences of few values without repetition are listed."""
        most = core.get("maxItems")
        if isinstance(most, int) and most <= 1:
            return
        try:
            values = self._values(core.get("items"))
        except CannotNegate:  # a definition that is being lowered: it has more than a few values
            values = None
        least = core.get("minItems", 0)
        if not isinstance(least, int) or not (most is None or isinstance(most, int)):
            return  # json_schema.py refuses it
        if values is None or "prefixItems" in core or len(values) > _MAX_UNIQUE or types_of(core) != ["array"]:
            if not self._is_followed:
                raise Unenforced(at.place, "uniqueItems")
            core["uniqueItems"] = True
            return
        lists = _sequences(values, least, len(values) if most is None else most)
        if not lists:
            raise InvalidRequest(
                self._field + f": {at.place} has no value: minItems is more than there are different items"
            )
        for key in ("items", "minItems", "maxItems", "type"):
            core.pop(key, None)
        core["enum"] = lists

    def _values(self, schema: object) -> list[Any] | None:
        """All values of a schema of few scalars. None: there are more, or others."""
        num_followed = 0
        while (
            isinstance(schema, dict) and [*schema] == ["$ref"] and schema["$ref"] != ROOT and num_followed < MAX_DEPTH
        ):
            schema, num_followed = self._resolve(schema["$ref"]), num_followed + 1
        match schema:
            case {"const": value, **rest} if not rest.keys() - {"type"}:
                values = [value]
            case {"enum": list(values), **rest} if not rest.keys() - {"type"}:
                pass
            case {"type": "boolean", **rest} if not rest:
                values = [True, False]
            case _:
                return None
        if isinstance(schema, dict) and "type" in schema:
            names = types_of({"type": schema["type"]})
            if "integer" in names:
                return None
            values = [value for value in values if types_of({"const": value})[0] in names]
        if any(isinstance(value, list | dict) for value in values):
            return None
        different: list[Any] = []
        for value in values:
            if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in different):
                different.append(value)
        return different

    def _contains(self, given: dict[str, Any], core: Schema, more: list[Schema | bool], at: At) -> None:
        least = int(given.get("minContains", 1))  # 2.0 is a count, too
        most = int(given["maxContains"]) if "maxContains" in given else None
        wanted = self._strictly(given["contains"], at.step("contains"))
        if most == 0:
            more.append({"items": any_of(negated(wanted, TYPES, self._resolve))})
            if least > 0:
                more.append(
                    {"type": [name for name in types_of(core) if name != "array"]}
                    if types_of(core) != ["array"]
                    else False
                )
            return
        if least == 0 and most is None:
            return
        if wanted is True or wanted == {}:
            more.append({"minItems": least} if most is None else {"minItems": least, "maxItems": most})
            return
        longest = core.get("maxItems")
        opposite = True if most is None else any_of(negated(wanted, TYPES, self._resolve))
        cases, is_exact = contains_cases(
            wanted, opposite, least, most, longest if isinstance(longest, int) and longest >= 0 else None
        )
        if not cases and not (isinstance(longest, int) and longest < least):
            raise Unenforced(at.place, "contains", "there are too many ways to place the items that match")
        if not is_exact:
            if self._num_strict:
                raise Unenforced(
                    at.place, "contains", f"in a condition it is enforced for at most {MAX_POSITIONS} items (maxItems)"
                )
            self._num_narrowed += 1
        others = [name for name in types_of(core) if name != "array"]
        more.append(any_of([*([{"type": others}] if others else []), *cases]))

    # ── unevaluated ──

    def _unevaluated(self, given: dict[str, Any], core: Schema, more: list[Schema | bool], at: At) -> None:
        """Properties that no other keyword speaks of: additionalProperties of all schemas that apply here together, if they apply to
        every value."""
        if not (_OPAQUE - {"unevaluatedProperties"}).isdisjoint(given):
            raise Unenforced(at.place, "unevaluatedProperties", "beside a choice of schemas")
        rest = self._strictly(given["unevaluatedProperties"], at.step("unevaluatedProperties"))
        names, patterns, is_open = self._evaluated({**core, "allOf": [*core.get("allOf", []), *more]}, at, 0, set())
        if not is_open:
            more.append(
                {
                    "properties": dict.fromkeys(names, True),
                    **({"patternProperties": dict.fromkeys(patterns, True)} if patterns else {}),
                    "additionalProperties": rest,
                }
            )

    def _evaluated(
        self, schema: Schema | bool, at: At, depth: int, seen: set[str]
    ) -> tuple[list[str], list[str], bool]:
        """Names and patterns of properties that a schema speaks of, and whether it speaks of all. `seen`: references that need not be
        followed again."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return [], [], False
        if id(schema) in self._opaque or "anyOf" in schema:
            raise Unenforced(at.place, "unevaluatedProperties", "beside a choice of schemas")
        names, patterns = [*schema.get("properties", {})], [*schema.get("patternProperties", {})]
        is_open = "additionalProperties" in schema
        parts = list(schema.get("allOf", []))
        if "$ref" in schema and schema["$ref"] not in seen:
            seen.add(schema["$ref"])
            parts.append(self._resolve(schema["$ref"]) if schema["$ref"] != ROOT else _unknown_root())
        for part in parts:
            more_names, more_patterns, is_open_too = self._evaluated(part, at, depth + 1, seen)
            names, patterns, is_open = names + more_names, patterns + more_patterns, is_open or is_open_too
        return names, patterns, is_open

    def _unevaluated_items(self, given: dict[str, Any], core: Schema, at: At) -> None:
        if "items" in core:
            return  # all are evaluated
        if any(
            key in given
            for key in (
                "allOf",
                "anyOf",
                "oneOf",
                "if",
                "not",
                "$ref",
                "$dynamicRef",
                "$recursiveRef",
                "contains",
                "dependentSchemas",
            )
        ):
            raise Unenforced(at.place, "unevaluatedItems", "beside other schemas for the same value")
        core["items"] = self._strictly(given["unevaluatedItems"], at.step("unevaluatedItems"))

    def _dynamic_reference(self, key: str, value: str, core: Schema, more: list[Schema | bool], at: At) -> None:
        """A dynamic reference is a plain one if no other schema may take the place of its target."""
        if key == "$recursiveRef":
            is_plain = self._references.num_recursive_anchors <= 1
        else:
            is_plain = self._references.dynamic.get(value.rpartition("#")[2], 0) <= 1
        if not is_plain:
            raise Unenforced(at.place, key, "several schemas may be its target")
        more.append({"$ref": self._reference(value, at)})

    # ── what is said of it ──

    def _check_cases(self, core: Schema, at: At) -> None:
        """Limit how many combinations of alternatives the compiler has to look at."""
        num_cases = 1
        for part in core.get("allOf", ()):
            if isinstance(part, dict) and isinstance(part.get("anyOf"), list):
                num_cases *= len(part["anyOf"])
        if num_cases > _MAX_CASES * 1024:
            raise InvalidRequest(self._field + f": {at.place} combines too many conditions")

    def _note(self, at: At, key: str) -> None:
        self._found.num_ignored += 1
        if len(self._found.ignored) < MAX_NOTED:
            self._found.ignored.append((*at.path, key))

    def _leave_out(self, error: Unenforced) -> None:
        if self._num_strict:
            raise error
        if not self._may_leave_out:
            what = "leave it out, or set structured_outputs.unenforced to 'check'"
            if not self._can_check:
                what = "leave it out"
            where = "" if self._can_check else " within a grammar or tags"
            raise Unsupported(self._field + f": {error.args[0]} cannot be enforced{where}{error.why}: {what}")
        self._found.unenforced.append(error.args[0] + error.why)

    def _check_shape(self, key: str, value: object, at: At) -> None:
        if words := wrong_shape(key, value):
            raise self._invalid(f"{at.place}/{escaped(key)}", words)

    def _invalid(self, place: str, words: str) -> InvalidRequest:
        return InvalidRequest(self._field + f": {place} {words}")


def _where_there(schema: Any, name: str) -> Any:
    """A schema for objects that have a property. Alternatives in it may differ by that one's values."""
    if not isinstance(schema, Mapping) or "$ref" in schema or not isinstance(schema.get("required", []), list):
        return schema
    return {"type": "object", **schema, "required": [*schema.get("required", []), name]}


def _name_of(reference: str) -> str:
    """The name of the definition that a reference of _reference() leads to."""
    return reference.removeprefix(DEFS).replace("~1", "/").replace("~0", "~")


def _unknown_root() -> Schema | bool:
    raise CannotNegate("$ref")


def _sequences(values: Sequence[Any], least: int, most: int) -> list[list[Any]]:
    """All sequences of different values, of `least` to `most`."""
    found: list[list[Any]] = []
    level: list[list[Any]] = [[]]
    for length in range(min(most, len(values)) + 1):
        if length >= least:
            found += level
        level = [[*one, value] for one in level for value in values if not any(value is other for other in one)]
    return found
