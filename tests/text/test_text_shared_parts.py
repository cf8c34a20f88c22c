"""Parts of a schema that occur more than once become definitions, which changes nothing about its answers."""

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from octavo.errors import Field
from octavo.text.grammar.build import schema_grammar
from octavo.text.grammar.json_schema import prepare
from octavo.text.grammar.shared_parts import shared
from tests.walks import SIZE, VOCABULARY

TOKENIZER = VOCABULARY.tokenizer(SIZE)
CODE = {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]+$"}
AGE = {"type": "integer", "minimum": 0, "maximum": 130}
TAGS = {"type": "array", "items": {"enum": ["new", "old", "friend"]}, "maxItems": 3}
NOTE = {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}, {"type": "boolean"}]}


def person(**more: Any) -> dict[str, Any]:
    parts = {"code": CODE, "age": AGE, "tags": TAGS, "note": NOTE, **more}
    return {"type": "object", "properties": parts, "required": ["code", "age"], "additionalProperties": False}


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": person(), "b": person(other=CODE), "c": {"type": "array", "items": CODE}}},
    {"type": "array", "items": {"anyOf": [person(), {"type": "array", "items": person(), "minItems": 1}, CODE]}},
    {"$ref": "#/$defs/p", "$defs": {"p": person(next={"$ref": "#/$defs/p"}, old={"$ref": "#/$defs/q"}), "q": person()}},
    {"type": "object", "patternProperties": {"^x": CODE, "^y": TAGS}, "additionalProperties": CODE},
    {"type": "object", "properties": {"shared-0": CODE, "b": CODE}, "$defs": {"shared-0": AGE, "shared-1": AGE}},
]


def masks(grammar: str, tokens: list[int]) -> list[bytes]:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    found = []
    for token in tokens:
        found.append(matcher.compute_bitmask())
        assert not matcher.is_error(), matcher.get_error()
        if matcher.is_stopped() or not matcher.consume_token(token):
            break
    return found


def walked(grammar: str, seed: int, num_tokens: int = 120) -> list[int]:
    rng, matcher, found = random.Random(seed), LLMatcher(TOKENIZER, grammar, log_level=0), []
    for _ in range(num_tokens):
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(SIZE) if bits[token // 8] >> token % 8 & 1]
        if not allowed or matcher.is_stopped():
            break
        found.append(rng.choice(allowed))
        assert matcher.consume_token(found[-1])
    return found


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_sharing_changes_no_mask(number: int) -> None:
    with_sharing = schema_grammar(SCHEMAS[number], VOCABULARY, field=Field("schema"))
    assert "#/$defs/shared-" in with_sharing
    head, _, body = with_sharing.partition("%json ")
    written, end = json.JSONDecoder().raw_decode(body)
    guidance = {"x-guidance": written["x-guidance"]}
    plain = {**guidance, **prepare(SCHEMAS[number], Field("schema"), is_followed=True).schema}  # type: ignore[dict-item]
    without = f"{head}%json {json.dumps(plain)}{body[end:]}"
    for seed in range(10):
        tokens = walked(with_sharing if seed % 2 else without, seed)
        assert masks(with_sharing, tokens) == masks(without, tokens)


def test_only_what_repeats_and_stands_alone_is_shared() -> None:
    twice = {"type": "object", "properties": {"a": CODE, "b": CODE, "c": AGE}}
    found = shared(twice)
    assert found["$defs"] == {"shared-0": CODE} and found["properties"]["c"] == AGE
    assert found["properties"]["a"] == found["properties"]["b"] == {"$ref": "#/$defs/shared-0"}
    short = {"type": "string"}
    for schema in (
        {"type": "object", "properties": {"a": CODE, "b": AGE}},  # nothing repeats
        {"type": "object", "properties": {"a": short, "b": short}},  # not worth it
        {**twice, "allOf": [{"properties": {"a": {"maxLength": 5}}}]},  # parts are joined
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/p", "maxProperties": 2}, "b": twice},
            "$defs": {"p": twice},
        },
        {"type": "array", "$comment": "uniqueItems", "items": twice},  # read where they stand
    ):
        assert shared(schema) is schema
    assert twice == {"type": "object", "properties": {"a": CODE, "b": CODE, "c": AGE}}, "it was changed"


def test_names_of_definitions_that_are_taken_are_not_given_again() -> None:
    taken = {"shared-0": AGE, "shared-1": AGE}
    found = shared({"type": "object", "properties": {"a": CODE, "b": CODE, "c": NOTE, "d": NOTE}, "$defs": taken})
    names = [part["$ref"].removeprefix("#/$defs/") for part in found["properties"].values()]
    assert [found["$defs"][name] for name in names] == [CODE, CODE, NOTE, NOTE] and {*names}.isdisjoint(taken)
    assert found["$defs"].items() >= taken.items()
