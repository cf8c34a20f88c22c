"""The shortest answers of schemas with alternatives."""

from typing import Any

import pytest

from octavo.errors import Field
from octavo.sampling.grammar.guarded_matcher import TokenKinds
from octavo.sampling.grammar.shortest_text import shortest_text
from octavo.text.grammar.build import schema_grammar
from tests.walks import SIZE, TOKENS, VOCABULARY

KINDS = TokenKinds(VOCABULARY, SIZE)


def text_of(schema: Any) -> str | None:
    return shortest_text(schema_grammar(schema, VOCABULARY, field=Field("schema")), KINDS.num_tokens)


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
        ({"anyOf": [{"type": "array", "items": {"type": "null"}, "minItems": 65}, {"const": "cc"}]}, None),
    ],
)  # fmt: skip
def test_of_each_choice_the_one_with_the_fewest_tokens_is_taken(schema: Any, text: str | None) -> None:
    assert text_of(schema) == text


@pytest.mark.parametrize(
    ("text", "pieces"), [(b'{"kind":null}', [b'{"', b"kind", b'":', b"null", b"}"]), (b"1200", [b"12", b"00"])]
)
def test_a_text_is_spelled_with_the_fewest_tokens(text: bytes, pieces: list[bytes]) -> None:
    assert [TOKENS[token] for token in KINDS.fewest_tokens(text)] == pieces
