"""Every answer closes: of random schemas, with every max_tokens that has room for the shortest answer, and whatever tokens are chosen."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from benchmarks.schemas.collection import SEED, collection
from octavo.errors import Field
from octavo.sampling.grammar.bitmask import tokens_of
from octavo.sampling.grammar.budgeted_end import BudgetedEnd, Ends
from octavo.sampling.grammar.growth import growth_of_grammar
from octavo.sampling.grammar.guarded_matcher import GuardedMatcher, TokenKinds, guarded
from octavo.sampling.grammar.matching import end_repetition, shortest_answer
from octavo.sampling.grammar.shortest_text import has_clear_values
from octavo.text.grammar.build import build_framed, schema_grammar
from octavo.text.grammar.limits import parser_limits
from octavo.text.tokenize.vocabulary import Vocabulary
from tests.walks import SPECIAL, TOKENS, VOCABULARY

NAMES = ["id", "name", "createdAt", "createdBy", "n", "items", "type", "a longer name of a property", "é", "b"]
STRINGS: list[dict[str, Any]] = [
    {}, {"minLength": 3}, {"pattern": "^[a-z]+-[0-9]{3}$"}, {"pattern": "x$"}, {"format": "date-time"}, {"enum": ["red", "green", "redder"]},
    {"format": "uuid"}, {"maxLength": 5},
]  # fmt: skip
NUMBERS: list[dict[str, Any]] = [{}, {"minimum": 10}, {"minimum": 0, "maximum": 1}, {"multipleOf": 5, "minimum": 12}]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null"] + ["object", "array", "anyOf"] * (2 if depth < 3 else 0)
    match rng.choice(kinds) if depth else rng.choice(["object", "array"]):
        case "string":
            return {"type": "string", **rng.choice(STRINGS)}
        case "integer" | "number" as kind:
            return {"type": kind, **rng.choice(NUMBERS)}
        case "object":
            names = rng.sample(NAMES, rng.randrange(1, 6))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randrange(len(names) + 1)),
                **({"additionalProperties": False} if rng.random() < 0.6 else {}),
            }
        case "array":
            unique = {"uniqueItems": True} if rng.random() < 0.2 else {}
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randrange(3)} | unique
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(2, 4))]}
        case kind:
            return {"type": kind}


def form(num_parts: int) -> dict[str, Any]:
    """A schema of many required parts, each with optional members of its own."""
    person: dict[str, Any] = {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "friend"]}, "maxItems": 3},
        "notes": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
    code = {"type": "string", "pattern": "^[a-z]{2,8}$"}
    parts = {f"part_{at}": {"$ref": f"#/$defs/kind_{at}"} if at % 3 else code for at in range(num_parts)}
    kinds = {
        f"kind_{at}": {
            "type": "object",
            "properties": {**person, f"choice_{at}": {"enum": [f"{at} {option}" for option in range(12)]}},
            "required": ["name", f"choice_{at}"],
            "additionalProperties": False,
        }
        for at in range(num_parts)
    }
    return {
        "type": "object",
        "properties": parts,
        "required": list(parts),
        "additionalProperties": False,
        "$defs": kinds,
    }


SLACK = [0, 1, 5, 20, 60, 120]  # tokens beyond those of the shortest answer


class Tokens:
    """A vocabulary, and what is made of it once."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary, self.size = vocabulary, vocabulary.size
        self.tokenizer = vocabulary.tokenizer(self.size)
        self.ends, self.kinds = Ends(vocabulary, self.size), TokenKinds(vocabulary, self.size)


WALKS = Tokens(VOCABULARY)


def answers(
    schema: dict[str, Any] | str, rng: random.Random, num_answers: int, slack: list[int] = SLACK, tokens: Tokens = WALKS
) -> list[tuple[int, bytes, bool]]:
    """max_tokens, a random answer, and whether it was closed. Empty: the shortest answer is not known. `schema`: or a grammar."""
    ends, kinds = tokens.ends, tokens.kinds
    grammar = schema if isinstance(schema, str) else schema_grammar(schema, tokens.vocabulary, field=Field("schema"))
    start = guarded(LLMatcher(tokens.tokenizer, grammar, log_level=0, limits=parser_limits()), grammar, kinds)
    proposals, growth = ends.proposals(grammar, kinds.fewest_tokens), growth_of_grammar(grammar, kinds.fewest_tokens)
    shortest = shortest_answer(ends, kinds, start, grammar, proposals)
    is_regular = not isinstance(start, GuardedMatcher) and has_clear_values(grammar)
    found: list[tuple[int, bytes, bool]] = []
    for _ in range(num_answers if shortest else 0):
        assert shortest is not None
        at, said, is_last = start.deep_copy(), b"", False
        closing = BudgetedEnd.of(shortest, proposals, growth, is_regular=is_regular)
        max_tokens = len(shortest.tokens) + rng.choice(slack)
        for left in range(max_tokens, 0, -1):
            bits = np.zeros(-(-tokens.size // 32), dtype=np.int32)
            at.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if "\nstart: part+" in grammar and left <= len(shortest.tokens):
                end_repetition(kinds, at, bits, list(tokens.vocabulary.eos_ids))
            is_last = ends.restrict(closing, at, bits, left)
            token = rng.choice(tokens_of(bits, tokens.size).tolist())
            if is_end := token in tokens.vocabulary.eos_ids:
                break
            said += tokens.vocabulary.spell(token)
            assert at.consume_token(token)
            closing.last = token
            if is_last:
                break
        found.append((max_tokens, said, is_end or at.is_accepting()))
    return found


@pytest.mark.parametrize("seed", range(24))
def test_every_answer_to_a_random_schema_closes(seed: int) -> None:
    rng = random.Random(seed)
    schema = random_schema(rng)
    found = answers(schema, rng, 4)
    assert found, "the shortest answer is not known"
    for max_tokens, said, is_closed in found:
        assert is_closed, (max_tokens, said)
        jsonschema.validate(json.loads(said), schema)


@pytest.mark.parametrize("slack", [0, 1, 5, 20])
def test_an_answer_of_many_parts_closes_with_little_slack(slack: int) -> None:
    """An end that is longer by a token or two than necessary does not fit, and white space and beginnings of characters use tokens up."""
    schema = form(6)
    for max_tokens, said, is_closed in answers(schema, random.Random(slack), 2, [slack]):
        assert is_closed, (max_tokens, said)
        jsonschema.validate(json.loads(said), schema)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_token_that_an_end_allows_leads_to_that_end(seed: str) -> None:
    """Where no token is to spare, a search behind the token may miss the end for which it was allowed: that end is kept. These two are of the few
    answers that were cut without that."""
    schema = dict(collection(SEED))["openapi_30-31"]
    for max_tokens, _, is_closed in answers(schema, random.Random(seed), 6, [0, 2, 4, 6, 8, 10]):
        assert is_closed, max_tokens


@pytest.mark.model
def test_an_answer_of_many_parts_closes_with_a_models_vocabulary() -> None:
    """Its tokens span several parts of JSON, so that an end can be spelled in many ways."""
    from octavo.text.load import load_text
    from octavo.weights.sources.source import resolve

    tokens, schema = Tokens(load_text(resolve("").path).vocabulary), form(24)
    for slack in (5, 20):
        for max_tokens, said, is_closed in answers(schema, random.Random(slack), 2, [slack], tokens):
            assert is_closed, (max_tokens, said)
            jsonschema.validate(json.loads(said), schema)


@pytest.mark.parametrize(
    ("schema", "is_clear"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "object"}]}, True),
        ({"anyOf": [{"type": "object", "required": ["a"]}, {"type": ["object", "null"]}]}, False),
        ({"items": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array"}]}, "$defs": {"a": {"enum": [[1]]}}}, False),
        ({"items": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "array"}]}, "$defs": {"a": {"enum": [1]}}}, True),
    ],
)
def test_values_are_clear_where_no_two_alternatives_are_alike(schema: dict[str, Any], is_clear: bool) -> None:
    assert has_clear_values(schema_grammar(schema, VOCABULARY, field=Field("schema"))) is is_clear


MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "user"]}, "content": {"type": "string"}},
    "required": ["role", "content"],
    "additionalProperties": False,
}
SYSTEM = {"type": "object", "properties": {"role": {"const": "system"}}, "required": ["role"]}
BASE = {"type": "object", "properties": {"id": {"type": "integer"}, "note": {"type": "string"}}, "required": ["id"]}
COMBINED = {
    "contains": {"type": "array", "items": MESSAGE, "contains": SYSTEM},
    "references with siblings": {
        "type": "object",
        "properties": {f"part_{at}": {"$ref": "#/$defs/part"} for at in range(4)},
        "required": [f"part_{at}" for at in range(4)],
        "$defs": {
            "base": BASE,
            "part": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"more": BASE}, "required": ["more"]}]},
        },
    },
    "conditions": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b", "c"]}, "x": BASE, "y": {"type": "string", "pattern": "^[a-z]{3}$"}},
        "required": ["kind"],
        "allOf": [
            {"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}, "else": {"required": ["y"]}},
            {"if": {"properties": {"kind": {"const": "b"}}}, "then": {"required": ["x"]}},
        ],
    },
}


@pytest.mark.parametrize("name", COMBINED)
def test_answers_to_combined_schemas_close(name: str) -> None:
    found = answers(COMBINED[name], random.Random(name), 8, [0, 1, 4, 15, 36, 56])
    assert found, "the shortest answer is not known"
    for max_tokens, said, is_closed in found:
        assert is_closed, (max_tokens, said)
        jsonschema.validate(json.loads(said), COMBINED[name])


@pytest.mark.parametrize("can_repeat", [False, True])
def test_a_call_that_must_come_is_closed_and_no_other_is_begun_without_room(can_repeat: bool) -> None:
    """A token may end a frame and begin the next."""
    pieces = [*TOKENS, b"><", b"</", b"tool", b"_call", *SPECIAL]
    first = len(pieces) - len(SPECIAL)
    eos_ids = (first, first + 1)
    tokens = Tokens(Vocabulary(len(pieces), pieces.__getitem__, frozenset(range(first, len(pieces))), eos_ids))
    call = {"type": "object", "properties": {"name": {"const": "f"}, "v": {"type": "array", "items": {"type": "integer"}, "minItems": 3}},
            "required": ["name", "v"], "additionalProperties": False}  # fmt: skip
    frame = ("<tool_call>\n", "\n</tool_call>")
    grammar = build_framed(call, frame, tokens.vocabulary, can_repeat=can_repeat, field=Field("tools")).grammar
    for slack in (0, 1, 7, 20, 40):
        for max_tokens, said, is_closed in answers(grammar, random.Random(slack), 4, [slack], tokens):
            assert is_closed, (max_tokens, said)
            for part in said.decode().split(frame[0])[1:]:
                jsonschema.validate(json.loads(part.removesuffix(frame[1])), call)
