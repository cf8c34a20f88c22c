"""Keywords of JSON schemas: each is enforced exactly, named back as an annotation, or refused and, on request, checked afterwards."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.schemas.suite import VOCABULARY, accepts, judge
from octavo.errors import Field, RequestError
from octavo.text.grammar.build import BuiltGrammar, build_schema, build_wish
from octavo.text.grammar.validate import is_valid

CASES = Path(__file__).parent.parent / "data" / "json_schema_cases.json"
DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"


def built(schema: Any, may_leave_out: bool = False) -> BuiltGrammar:
    return build_schema(schema, VOCABULARY, field=Field("schema"), may_leave_out=may_leave_out)


def test_no_verdict_on_a_case_of_the_suite_is_wrong():
    kinds: dict[str, int] = {}
    for name, schema, values in json.loads(CASES.read_text())["cases"]:
        verdict = judge(schema, [{"data": data, "valid": valid, "description": name} for data, valid in values])
        assert verdict.kind != "WRONG", (name, verdict.why)
        kinds[verdict.kind] = kinds.get(verdict.kind, 0) + 1
    assert kinds["enforced"] > 440 and kinds["checked"] > 40 and sum(kinds.values()) == 577


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "nullable": True}, ["a", None], [1]),
        ({"type": "string", "nullable": True, "enum": ["a", None]}, ["a", None], ["b"]),
        ({"not": {"type": ["string", "null"]}}, [1, [], True], ["a", None]),
        ({"type": "string", "not": {"enum": ["no", "nope", ""]}}, ["n", "nop", "yes", "nopes"], ["no", "nope", ""]),
        ({"type": "integer", "not": {"enum": [1, 2, 5]}}, [0, 3, 4, 6, -7], [1, 2, 5]),
        ({"type": "number", "not": {"const": 2}}, [1, 2.5, 1.999], [2]),
        ({"not": {"required": ["a", "b"]}, "type": "object"}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 2}]),
        ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        (
            {
                "type": "object",
                "properties": {"kind": {"enum": ["a", "b"]}, "x": {}, "y": {}},
                "required": ["kind"],
                "if": {"properties": {"kind": {"const": "a"}}},
                "then": {"required": ["x"]},
                "else": {"required": ["y"]},
            },
            [{"kind": "a", "x": 1}, {"kind": "b", "y": 1}, {"kind": "b", "x": 1, "y": 1}],
            [{"kind": "a", "y": 1}, {"kind": "b", "x": 1}],
        ),
        (  # a discriminator in a part of allOf, as OpenAPI writes inheritance
            {
                "$defs": {
                    "Pet": {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]},
                    "Cat": {"allOf": [{"$ref": "#/$defs/Pet"}, {"properties": {"kind": {"enum": ["cat"]}, "lives": {"type": "integer"}}}]},
                    "Dog": {"allOf": [{"$ref": "#/$defs/Pet"}, {"properties": {"kind": {"enum": ["dog"]}, "size": {"type": "integer"}}}]},
                },
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            },
            [{"kind": "cat"}, {"kind": "dog", "size": 3}],
            [{}, {"kind": "cow"}, {"kind": "cat", "lives": "nine"}],
        ),
        (  # a property that one requires and the other does not have
            {"oneOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": False},
                {"type": "object", "properties": {"a": {"type": "integer"}, "c": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
            ]},
            [{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "c": 2}],
            [{"a": 1, "b": 2, "c": 3}, {"b": 2}],
        ),
        ({"oneOf": [{"type": "array", "items": {"type": kind}} for kind in ("string", "integer")]}, [["a"], [1, 2]], [[], ["a", 1]]),
        (  # a discriminator that has a default, and so is not required
            {"oneOf": [
                {"type": "object", "properties": {"kind": {"const": kind, "default": kind}, kind: {"type": "integer"}}, "required": [kind]}
                for kind in ("a", "b")
            ], "discriminator": {"propertyName": "kind"}},
            [{"kind": "a", "a": 1}, {"kind": "b", "b": 1}],
            [{"a": 1, "b": 1}, {"kind": "a", "b": 1}],
        ),
        (  # as forms have it (react-jsonschema-form)
            {"type": "object", "properties": {"choice": {"enum": ["a", "b"]}}, "dependencies": {"choice": {"oneOf": [
                {"properties": {"choice": {"enum": [name]}, name: {"type": "integer"}}, "required": [name]} for name in "ab"
            ]}}},
            [{}, {"choice": "a", "a": 1}, {"choice": "b", "b": 2}],
            [{"choice": "a"}, {"choice": "a", "b": 1}, {"choice": "b", "b": "x"}],
        ),
        (  # definitions that lead back to each other, and to the root
            {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"oneOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
            [{"next": None}, {"v": 1, "next": {"next": None}}],
            [{}, {"next": 1}],
        ),
        (
            {
                "$defs": {
                    "Node": {"type": "object", "properties": {"k": {"const": "n"}, "left": {"oneOf": [{"$ref": "#/$defs/Node"}, {"$ref": "#/$defs/Leaf"}]}}, "required": ["k", "left"]},
                    "Leaf": {"type": "object", "properties": {"k": {"const": "l"}}, "required": ["k"]},
                },
                "$ref": "#/$defs/Node",
            },
            [{"k": "n", "left": {"k": "l"}}, {"k": "n", "left": {"k": "n", "left": {"k": "l"}}}],
            [{"k": "n"}, {"k": "n", "left": {}}, {"k": "l"}],
        ),
        (
            {"$schema": DRAFT_2019, "$recursiveAnchor": True, "type": "object", "properties": {"kids": {"items": {"$recursiveRef": "#"}}}},
            [{}, {"kids": [{"kids": []}]}],
            [{"kids": [1]}],
        ),
        (  # more conditions than there can be combinations of
            {
                "type": "object",
                "properties": {"k": {"enum": list("abcdefghij")}, **{name: {"type": "integer"} for name in "abcdefghij"}},
                "required": ["k"],
                "allOf": [{"if": {"properties": {"k": {"const": name}}}, "then": {"required": [name]}} for name in "abcdefghij"],
            },
            [{"k": "a", "a": 1}, {"k": "j", "b": 1, "j": 1}],
            [{"k": "a"}, {"k": "j", "a": 1}, {"k": "x"}],
        ),
        (  # … of a property that may be missing
            {
                "type": "object",
                "properties": {"k": {"enum": ["a", "b", "c", "d"]}},
                "allOf": [
                    {"if": {"properties": {"k": {"enum": [name, "d"]}}, "required": ["k"]}, "then": {"required": [name]}, "else": {"required": ["z"]}}
                    for name in "abc"
                ],
            },
            [{"z": 1}, {"k": "a", "a": 1, "z": 1}, {"k": "d", "a": 1, "b": 1, "c": 1}],
            [{}, {"k": "a", "z": 1}, {"k": "d", "a": 1}],
        ),
        (
            {
                "type": "object",
                "properties": {"k": {"enum": ["a", "b", "c"]}},
                "allOf": [{"if": {"properties": {"k": {"const": name}}}, "then": {"required": [name]}} for name in "abc"],
            },
            [{"a": 1, "b": 1, "c": 1}, {"k": "a", "a": 1}],
            [{}, {"k": "a"}, {"a": 1, "b": 1}],
        ),
        ({"type": "object", "properties": {name: {} for name in "abcd"}, "required": ["a"], "maxProperties": 2, "additionalProperties": False}, [{"a": 1}, {"a": 1, "c": 1}], [{}, {"a": 1, "b": 1, "c": 1}]),
        ({"type": "object", "properties": {name: {} for name in "abcd"}, "maxProperties": 2}, [{}, {"a": 1, "c": 1}], [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "x": 1}]),
        ({"type": "object", "properties": {name: {} for name in "abcd"}, "minProperties": 2, "maxProperties": 3}, [{"a": 1, "d": 1}, {"b": 1, "c": 1, "d": 1}], [{"a": 1}, {"a": 1, "b": 1, "c": 1, "d": 1}]),
        ({"type": "object", "properties": {f"p{at}": {} for at in range(30)}, "minProperties": 2}, [{"p0": 1, "p3": 1}, {"p1": 1, "p2": 1, "p29": 1}], [{}, {"p2": 1}]),
        # classes of characters as ECMAScript and Python read them
        ({"type": "string", "pattern": "^[[:alpha:]]+$"}, ["a]", "[]]"], ["abc", "b"]),
        ({"type": "string", "pattern": "^[a&&b~~c]$"}, ["a", "&", "~"], ["d"]),
        ({"type": "string", "pattern": "^[+--]$"}, ["+", ",", "-"], [".", "*"]),
        ({"type": "string", "pattern": "^[--/]$"}, ["-", ".", "/"], [","]),
        ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 2}, 3], [{"a": 1}]),
        ({"dependencies": {"a": {"required": ["b"]}}}, [{"b": 1}, {"a": 1, "b": 2}, 3], [{"a": 1}]),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1}, [["a"], ["c", "a", "b"]], [[], ["a", "a"]]),
        ({"type": "array", "uniqueItems": True}, [[], [1, True, "1"], [[1], [[1]]], [{"a": 1}, {"a": 2}]], [[1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, [["a", "b"], [""]], [["a", "a"], ["a", "b", "a"]]),
        ({"uniqueItems": True, "prefixItems": [{}, {"uniqueItems": False}]}, [[1, [1, 1]], 3], [[2, 2]]),
        ({"type": "array", "maxItems": 3, "contains": {"const": 1}}, [[1], [2, 1], [2, 3, 1]], [[], [2], [2, 3, 4]]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1}, [0, -5], [1.5, "a"]),
        ({"type": "string", "maxLength": 2**31 - 1}, ["", "a" * 50], [1]),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}, [{"a": 1, "c": 2}, {"a": 1, "b": 1, "c": 1}], [{}, {"b": 1}]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "additionalProperties": False}, [{"a": 1}, {"a": 1, "b": 1}], [{}]),
        ({"type": ["object", "null"], "properties": {"a": {}, "b": {}}, "required": ["b"], "minProperties": 2}, [None, {"a": 1, "b": 1}], [{"b": 1}]),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"p": {"type": "array", "items": {"$ref": "#/$defs/a"}, "uniqueItems": True}}}}}, [{"p": [{}, {"p": []}]}], [{"p": [{}, {}]}]),
        ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ["1", "-0.5", ".5", "7."], ["", "-", ".", "+."]),
        ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"}, ["123", "1.25"], ["", "-"]),
        (
            {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"},
            ["a@b.cd", "a.b'c-d@e.f.gh"],
            [".a@b.cd", "a..b@c.de", "a.@b.cd", "a@b"],
        ),
        ({"type": "array", "contains": {"const": 1}}, [[1], [2, 1], [2, 3, 1, 4, 5]], [[], [2], [2, 3, 4]]),
        ({"type": ["array", "null"], "items": {"type": "integer"}, "contains": {"minimum": 5}}, [None, [1, 5, 2]], [[], [1, 4], ["a", 5]]),
        ({"type": "array", "maxItems": 4, "contains": {"const": 1}, "minContains": 2}, [[1, 1], [2, 1, 3, 1]], [[1], [1, 2, 3]]),
        ({"type": "array", "contains": {"const": 1}, "maxContains": 1}, [[1], [2, 1, 3]], [[], [2], [1, 1], [1, 2, 1]]),
        ({"type": "array", "contains": {"const": 1}, "minContains": 0, "maxContains": 1}, [[], [2, 3], [2, 1]], [[1, 1], [2, 1, 1]]),
        ({"type": "array", "contains": {"type": "string"}, "minContains": 2, "maxContains": 3}, [["a", 1, "b"]], [["a"], ["a", "b", "c", "d"]]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, {"a": 1, "b": []}], [{"c": 1}]),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, [{}, {"ab": 1}], [{"abc": 1}]),
        ({"$schema": DRAFT_4, "minimum": 2, "exclusiveMinimum": True}, [3, "a"], [2]),
        ({"type": "array", "items": [{"type": "null"}], "additionalItems": False}, [[], [None]], [[1], [None, None]]),
        ({"$id": "http://a.org/b", "$ref": "c", "$defs": {"x": {"$id": "/c", "type": "null"}}}, [None], [1]),
        ({"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"type": "null"}}}}, [None], [1]),
        ({"$schema": DRAFT_7, "$ref": "#/definitions/a", "minimum": 5, "definitions": {"a": {"type": "integer"}}}, [1], ["a"]),
        (
            {"type": "object", "allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False},
            [{}, {"a": 1, "b": 2}],
            [{"c": 1}],
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_a_keyword_allows_what_it_says_and_nothing_else(schema: Any, valid: list[Any], invalid: list[Any]):
    verdict = judge(
        schema,
        [{"data": value, "valid": True, "description": ""} for value in valid]
        + [{"data": value, "valid": False, "description": ""} for value in invalid],
    )
    assert verdict.kind == "enforced", verdict
    assert all(is_valid(schema, json.dumps(value)) for value in valid)
    assert not any(is_valid(schema, json.dumps(value)) for value in invalid)


@pytest.mark.parametrize(("pattern", "valid", "invalid"), [(r"^[\w-.]+$", "a-b.c", "+/"), (r"^[.-\w]+$", "a-b.", "/:")])
def test_a_set_is_no_end_of_a_range(pattern: str, valid: str, invalid: str):
    """As ECMAScript reads them; Python refuses such a pattern."""
    cases = [{"data": valid, "valid": True}, *({"data": one, "valid": False} for one in invalid)]
    assert (
        judge({"type": "string", "pattern": pattern}, [{**case, "description": ""} for case in cases]).kind
        == "enforced"
    )


@pytest.mark.parametrize(
    "pattern", [r"^\W$", r"^\D$", r"^\S$", r"^[\W_]$", r"^[^\w]$", r"^[^\d]$", r"^[^\s]$", r"^[^\W]$"]
)
def test_what_is_allowed_matches_in_every_dialect(pattern: str):
    """Python's sets are those of all scripts, ECMAScript's those of ASCII."""
    grammar = built({"type": "string", "pattern": pattern}).grammar
    for character in ("a", "_", "1", "+", "-", "é", "杷", "٣", "½", "\u2003", "\xa0", "\ufeff", "\u0301"):
        if accepts(grammar, json.dumps(character, ensure_ascii=False)):
            assert re.search(pattern, character) and re.search(pattern, character, re.ASCII), character
    assert any(accepts(grammar, json.dumps(character)) for character in "+a")


def test_annotations_are_accepted_and_named_by_path():
    schema = {
        "id": "http://example.com/a.json",
        "title": "A",
        "strict": True,
        "x-order": 3,
        "type": "object",
        "properties": {
            "name": {"type": "string", "format": "phone", "javaType": "String", "readonly": True, "enumNames": ["b"]},
            "count": {"type": "integer", "format": "int32", "markdownDescription": "*c*", "default": 3},
        },
        "then": {"required": ["name"]},
        "required": ["name"],
    }
    found = built(schema)
    assert {".".join(map(str, path[1:])) for path in found.ignored} == {
        "id",
        "title",
        "strict",
        "x-order",
        "then",
        "properties.name.format",
        "properties.name.javaType",
        "properties.name.readonly",
        "properties.name.enumNames",
        "properties.count.format",
        "properties.count.markdownDescription",
        "properties.count.default",
    }
    assert found.num_ignored == 12 and found.unenforced == [] and {path[0] for path in found.ignored} == {"schema"}
    assert accepts(found.grammar, '{"name":"a","count":3}') and not accepts(found.grammar, '{"count":3}')


def test_a_property_may_say_that_it_is_required_as_in_draft_3():
    found = built({"type": "object", "properties": {"a": {"type": "null", "required": True}, "b": {"required": False}}})
    assert accepts(found.grammar, '{"a":null}') and not accepts(found.grammar, '{"b":1}')


def test_names_in_data_are_not_keywords():
    assert built({"const": {"title": 1, "x": {"$ref": "#/nowhere"}}}).ignored == []
    assert built({"properties": {"title": {"type": "null"}, "id": {}}}).ignored == []


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        (
            {"type": "array", "contains": {"const": 1}, "minContains": 40},
            ["'contains' (at #) (there are too many ways to place the items that match)"],
        ),
        (
            {"type": "array", "not": {"contains": {"const": 1}}},
            ["'contains' (at #/not) (in a condition it is enforced for at most 16 items (maxItems))"],
        ),
        ({"type": "string", "not": {"pattern": "a"}}, ["'not' (at #) (the opposite of pattern is not known)"]),
        ({"type": "string", "pattern": "^(?!a)b"}, ["'pattern' '^(?!a)b'"]),
        (
            {"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]},
            ["'oneOf' (at #) (the opposite of pattern is not known)"],
        ),
        (
            {"type": "object", "minProperties": 2},
            ["'minProperties' (at #) (enforced up to 1, and for a choice among few listed properties)"],
        ),
        (
            {"type": "object", "patternProperties": {"^foo": {"minimum": 3}, "bar$": {"maximum": 9}}},
            ["'patternProperties' '^foo'", "'patternProperties' 'bar$'"],
        ),
        ({"$defs": {"a": {"extends": {}}}, "items": {"$ref": "#/$defs/a"}}, ["'extends' (at #/$defs/a)"]),
        ({"$defs": {"a": {"extends": {}}}, "type": "null"}, []),  # nothing refers to it
    ],
)
def test_what_cannot_be_enforced_is_refused_or_left_out_by_name(schema: Any, left_out: list[str]):
    if left_out:
        with pytest.raises(RequestError):
            built(schema)
    found = built(schema, may_leave_out=True)
    assert found.unenforced == left_out


def test_a_condition_is_left_out_whole():
    """With a part of its condition left out, a schema would apply to other values."""
    schema = {"if": {"contains": {"const": 1}}, "then": {"minItems": 3}}
    found = built(schema, may_leave_out=True)
    assert len(found.unenforced) == 1 and found.unenforced[0].startswith(("'if'", "'contains'"))
    assert accepts(found.grammar, "[1]") and accepts(found.grammar, "[2]")


def test_the_wish_says_whether_the_answer_is_checked():
    schema = {"type": "object", "extends": {}}
    assert build_wish({"json": schema, "unenforced": "check"}, VOCABULARY).unenforced
    for mode in ("strict", None):
        with pytest.raises(RequestError, match="extends"):
            build_wish({"json": schema, "unenforced": mode}, VOCABULARY)
    with pytest.raises(RequestError, match="unenforced must be 'strict' or 'check'"):
        build_wish({"json": schema, "unenforced": "maybe"}, VOCABULARY)


def test_parts_that_are_referred_to_twice_at_every_level_are_read_once():
    """Thirty levels would be a billion parts."""
    parts = {f"a{at}": {"allOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 2} for at in range(30)}
    parts["a30"] = {"properties": {"x": {"type": "null"}}}
    assert built({"$defs": parts, "$ref": "#/$defs/a0", "type": "object", "unevaluatedProperties": False}).grammar


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "not": {"$ref": "#/$defs/a"}},
        {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/a"},
        },
    ],
    ids=["not", "propertyNames"],
)
def test_references_without_an_end_are_refused(schema: Any):
    with pytest.raises(RequestError, match="cannot be enforced"):
        built(schema)
    with pytest.raises(RequestError, match="refers to itself"):
        built(schema, may_leave_out=True)


@pytest.mark.parametrize("text", ["", "[1", "NaN", "[1, 1]", '{"a": Infinity}', "[" * 100_000])
def test_what_is_no_json_or_no_value_of_the_schema_is_not_valid(text: str):
    assert not is_valid({"uniqueItems": True}, text)


def test_validation_reads_nothing_outside_the_schema():
    with pytest.raises(RequestError, match="cannot be used for validation"):
        is_valid({"$ref": "http://127.0.0.1:1/schema"}, "1")
