"""Schemas whose keywords have values of a wrong kind are refused, wherever they stand and whatever reads them first."""

import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import Field, InvalidRequest, RequestError
from octavo.text.grammar.build import grammar_of
from octavo.text.grammar.json_schema import prepare
from octavo.text.grammar.keywords import BY_NAME, LISTS, PLAIN, REWRITTEN, SINGLES
from tests.walks import VOCABULARY

KEYWORDS = sorted({*PLAIN, *BY_NAME, *LISTS, *SINGLES, *REWRITTEN, "$id", "$anchor", "$defs", "definitions", "$schema"})
WRONG: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**400, "", "'", "object", [], [1], [None], ["a", "a"], [[]], [{}], [{"a": 1}], {}, {"a": 1},
    {"a": "'"}, {"a": []}, {"a": [1]}, {"type": {"a": []}},
]  # fmt: skip
# What reads a schema by itself: to negate it, to tell it from others, to take its names or its values.
AROUND: dict[str, Callable[[Any], Any]] = {
    "alone": lambda part: part,
    "oneOf": lambda part: {"oneOf": [part, {"type": "null"}]},
    "overlapping": lambda part: {"oneOf": [part, {"minLength": 2}, {"required": ["a"]}]},
    "not": lambda part: {"not": part},
    "if": lambda part: {"if": part, "then": {"required": ["a"]}, "else": part},
    "tagged": lambda part: {"oneOf": [{"properties": {"a": one}, "required": ["a"], "type": "object"} for one in (part, {"const": 1})]},
    "names": lambda part: {"type": "object", "propertyNames": part},
    "items": lambda part: {"type": "array", "items": part, "uniqueItems": True, "maxItems": 3},
    "contains": lambda part: {"type": "array", "contains": part, "maxItems": 3},
    "dependent": lambda part: {"type": "object", "dependentSchemas": {"a": part}, "dependencies": {"b": part}},
    "referred": lambda part: {"$defs": {"a": part}, "oneOf": [{"$ref": "#/$defs/a"}, {"not": {"$ref": "#/$defs/a"}}]},
    "unevaluated": lambda part: {"allOf": [part], "unevaluatedProperties": False, "type": "object"},
}  # fmt: skip
BESIDE: list[dict[str, Any]] = [
    {}, {"type": "object", "nullable": True}, {"type": "array", "uniqueItems": True}, {"minimum": 1, "maximum": 3},
    {"dependencies": {"a": ["b"]}}, {"contains": {"const": 1}, "type": "array"}, {"required": ["a"]},
]  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
def test_a_keyword_of_a_wrong_kind_is_refused_or_does_nothing(around: str) -> None:
    for number, (keyword, value) in enumerate(itertools.product(KEYWORDS, WRONG)):
        schema = AROUND[around]({**BESIDE[number % len(BESIDE)], keyword: value})
        with contextlib.suppress(RequestError):
            prepare(schema, Field("schema"), may_leave_out=number % 2 == 0)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("anyOf", "'"), ("anyOf", {}), ("allOf", 1), ("oneOf", "'"), ("not", "'"), ("if", 1), ("properties", []), ("properties", "a"),
        ("patternProperties", 1), ("required", "a"), ("required", [1]), ("enum", "a"), ("enum", {}), ("minimum", "1"), ("maximum", []),
        ("exclusiveMinimum", {}), ("multipleOf", "2"), ("minLength", "1"), ("maxItems", "3"), ("minItems", None), ("maxProperties", []),
        ("pattern", 1), ("dependentRequired", []), ("dependentRequired", {"a": "b"}), ("dependentSchemas", 1), ("contains", 1),
        ("items", 1), ("prefixItems", "a"), ("additionalProperties", 1), ("type", 1), ("type", [{}]), ("$ref", 1), ("propertyNames", 1),
    ],
)  # fmt: skip
def test_the_keyword_is_named_wherever_a_schema_comes_in(keyword: str, value: Any) -> None:
    part = {keyword: value, **({"then": {"type": "null"}} if keyword == "if" else {})}
    schema = {"oneOf": [part, {"type": "null"}]}
    wishes = [
        {"json": schema},
        {"grammar": 'start: "a" | %json ' + json.dumps(schema)},
        {"structural_tag": tag_of(schema)},
        {"json": schema, "unenforced": "check"},
        {"json": {"not": part}},
    ]
    for wish in wishes:
        with pytest.raises(InvalidRequest, match="must be") as caught:
            grammar_of(wish, VOCABULARY)
        assert keyword.lstrip("$") in str(caught.value), wish


def tag_of(schema: Any) -> dict[str, Any]:
    return {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": schema, "end": "</a>"}],
        "triggers": ["<a>"],
    }


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from([0.5, "", "a", "#", "object", "^a$"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=4), st.sampled_from(sorted(AROUND)), st.booleans())
def test_no_schema_ends_in_anything_but_a_refusal(part: dict[str, Any], around: str, may_leave_out: bool) -> None:
    with contextlib.suppress(RequestError):
        prepare(AROUND[around](part), Field("schema"), may_leave_out=may_leave_out)


@pytest.mark.parametrize(
    ("draft", "schema", "ignored"),
    [
        ("draft/2019-09", {"type": "array", "prefixItems": [{"type": "null"}], "items": False}, "prefixItems"),
        ("draft-07", {"type": "array", "contains": {"const": 1}, "minContains": 0, "maxItems": 2}, "minContains"),
    ],
)
def test_a_keyword_of_a_later_draft_takes_nothing_away_from_the_others(
    draft: str, schema: dict[str, Any], ignored: str
) -> None:
    lowered = prepare({"$schema": f"http://json-schema.org/{draft}/schema#", **schema}, Field("schema"))
    assert (ignored,) in lowered.ignored and ignored not in lowered.schema
    assert ignored not in {key for (key, *_) in prepare(schema, Field("schema")).ignored}
