"""The shortest answers of schemas with alternatives."""

from typing import Any

import pytest
from llguidance import LLMatcher

from octavo.errors import Field
from octavo.sampling.grammar.grammar_schemas import only_schema
from octavo.sampling.grammar.guarded_matcher import TokenKinds, guarded
from octavo.sampling.grammar.shortest_text import shortest_text
from octavo.text.grammar.build import schema_grammar
from tests.walks import SIZE, TOKENS, VOCABULARY

KINDS = TokenKinds(VOCABULARY, SIZE)


def text_of(schema: Any) -> str | None:
    lowered = only_schema(schema_grammar(schema, VOCABULARY, field=Field("schema")))
    assert lowered is not None
    return shortest_text(lowered, KINDS.num_tokens)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"enum": ["longest", "longer", "long"]}, '"long"'),
        ({"enum": ["abc", "kinds"]}, '"kinds"'),  # "kind" is one token
        ({"type": ["string", "null"], "minLength": 9}, "null"),
        ({"anyOf": [{"type": "string", "minLength": 9}, {"type": "array", "items": {"const": 5}, "minItems": 2}]}, "[5,5]"),
        ({"type": "integer", "minimum": 12, "maximum": 99}, "12"),
        ({"type": "object", "properties": {"b": {"enum": ["x", "yy"]}, "a": {"type": "boolean"}}, "required": ["a", "b"]},
         '{"b":"x","a":true}'),
        ({"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [
            {"type": "object", "properties": {"inner": {"$ref": "#/$defs/tree"}}, "required": ["inner"]}, {"const": "leaf"}]}}},
         '"leaf"'),
        ({"anyOf": [{"type": "string", "pattern": "^(aaaa|b)$"}, {"const": "cc"}]}, '"b"'),
        ({"anyOf": [{"type": "string", "format": "ipv4"}, {"const": "a long word"}]}, '"0.0.0.0"'),
        ({"anyOf": [{"type": "number", "multipleOf": 7, "minimum": 8}, {"const": "abc"}]}, "14"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1001}, None),
        ({"minLength": 3, "minItems": 2}, "0"),  # which says nothing of numbers
        ({"$ref": "#/$defs/a", "properties": {"c": {"const": 1}}, "required": ["c"], "$defs": {"a": {"type": "object", "properties": {
            "b": {"const": 2}}, "required": ["b"]}}}, '{"b":2,"c":1}'),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9, "multipleOf": 2}]}, "4"),
        ({"allOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]}, "null"),
        ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}, {"enum": ["ba", "acb", "ab"]}]}, '"ab"'),
        ({"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "minLength": 6}, '"AA0000"'),
        ({"type": "object", "properties": {"k": {"enum": ["a", "b"]}}, "required": ["k"], "if": {"properties": {"k": {"const": "a"}}},
          "then": {"required": ["a long name"]}, "else": {"required": ["x"]}}, '{"k":"b","x":0}'),
        ({"type": "object", "patternProperties": {"^x-[0-9]$": {"type": "null"}}, "additionalProperties": False, "minProperties": 1},
         '{"x-0":null}'),
        ({"type": "array", "items": {"type": "integer", "minimum": 8}, "uniqueItems": True, "minItems": 3}, "[8,9,10]"),
        ({"type": "array", "items": {"enum": ["aaa", "b", "cc"]}, "uniqueItems": True, "minItems": 2, "maxItems": 9}, '["b","cc"]'),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.1"),
        ({"type": "number", "minimum": 1e-10, "maximum": 2e-10}, "0.0000000001"),
        ({"type": "integer", "exclusiveMaximum": -5}, "-6"),
        ({"const": 1.0}, "1"),
        ({"type": "string", "pattern": r"^\S\D\W[^\s]$"}, '"aa-a"'),
        ({"type": "string", "pattern": r"^\p{Lu}[\p{L}\p{N}]{2}$"}, '"Aaa"'),
        ({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]}, '{"next":null}'),
    ],
)  # fmt: skip
def test_of_each_choice_the_one_with_the_fewest_tokens_is_taken(schema: Any, text: str | None) -> None:
    assert text_of(schema) == text
    if text is not None:
        grammar = schema_grammar(schema, VOCABULARY, field=Field("schema"))
        at = guarded(LLMatcher(VOCABULARY.tokenizer(SIZE), grammar, log_level=0), grammar, KINDS)
        assert at.consume_tokens(KINDS.fewest_tokens(text.encode())) and at.is_accepting(), at.get_error()


@pytest.mark.parametrize(
    ("text", "pieces"), [(b'{"kind":null}', [b'{"', b"kind", b'":', b"null", b"}"]), (b"1200", [b"12", b"00"])]
)
def test_a_text_is_spelled_with_the_fewest_tokens(text: bytes, pieces: list[bytes]) -> None:
    assert [TOKENS[token] for token in KINDS.fewest_tokens(text)] == pieces
