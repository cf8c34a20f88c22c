"""uniqueItems, beside the grammar: equal items never, a valid answer always, whatever tokens are sampled and wherever it is cut."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from octavo.errors import Field, Unsupported
from octavo.sampling.grammar.budgeted_end import BudgetedEnd, Ends
from octavo.sampling.grammar.growth import growth_of_grammar
from octavo.sampling.grammar.guarded_matcher import STUCK, GuardedMatcher, TokenKinds, guarded
from octavo.sampling.grammar.matcher import Matcher
from octavo.text.grammar.build import build_framed, build_wish, schema_grammar
from tests.walks import CALL, EOS, SIZE, SPECIAL, TOKENS, VOCABULARY

TOKENIZER = VOCABULARY.tokenizer(SIZE)
ENDS, KINDS = Ends(VOCABULARY, SIZE), TokenKinds(VOCABULARY, SIZE)
FIELD = Field("schema")
ARRAY = {"type": "array", "uniqueItems": True}
WORD = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "strings": {**ARRAY, "items": WORD, "minItems": 3},
    "short strings": {**ARRAY, "items": {"type": "string", "maxLength": 1}, "minItems": 3},
    "all of an enum": {**ARRAY, "items": {"enum": ["a", "ab", "abc", "b", "c", "bd"]}, "minItems": 6},
    "all of two enums": {
        **ARRAY,
        "items": {"anyOf": [{"enum": ["a", "ab", "abc"]}, {"enum": ["b", "c", "bd"]}]},
        "minItems": 6,
    },
    "all integers": {**ARRAY, "items": {"type": "integer", "minimum": 7, "maximum": 12}, "minItems": 6},
    "all halves": {**ARRAY, "items": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.5}, "minItems": 3},
    "numbers": {**ARRAY, "items": {"type": "number"}, "minItems": 3},
    "anything": {**ARRAY, "minItems": 3},
    "all of a pattern": {**ARRAY, "items": {"type": "string", "pattern": "^[a-c]$"}, "minItems": 3},
    "objects": {
        **ARRAY,
        "items": {
            "type": "object",
            "properties": {"k": {"enum": ["x", "y"]}, "n": {"type": "boolean"}},
            "required": ["k"],
            "additionalProperties": False,
        },
        "minItems": 3,
    },
    "open objects": {**ARRAY, "items": {"type": "object", "additionalProperties": {"type": "integer"}}, "minItems": 2},
    "a tuple": {**ARRAY, "prefixItems": [{"type": "boolean"}] * 2, "items": {"type": "integer"}, "minItems": 3},
    "arrays of arrays": {
        "type": "object",
        "properties": {
            "names": {**ARRAY, "items": {"$ref": "#/$defs/name"}, "minItems": 2},
            "rows": {
                "type": "array",
                "items": {**ARRAY, "items": {**ARRAY, "items": {"type": "integer"}}, "minItems": 2},
            },
        },
        "required": ["names", "rows"],
        "additionalProperties": False,
        "$defs": {"name": {"type": "string", "minLength": 1}},
    },
}


def matcher_of(grammar: str) -> Matcher:
    return guarded(LLMatcher(TOKENIZER, grammar, log_level=0), grammar, KINDS)


def grammar_of(schema: object) -> str:
    return schema_grammar(schema, VOCABULARY, field=FIELD)


def answer(grammar: str, seed: str, max_tokens: int, comes_back: float = 0.0) -> bytes:
    """A random answer. `comes_back`: the probability, per token, that all state but the tokens is lost."""
    rng, leaves = random.Random(seed), random.Random(seed + "leaves")
    proposals, growth = ENDS.proposals(grammar, KINDS.fewest_tokens), growth_of_grammar(grammar, KINDS.fewest_tokens)
    start = matcher_of(grammar)
    assert isinstance(start, GuardedMatcher)
    shortest = ENDS.shortest(start, proposals)
    assert shortest is not None
    max_tokens = max(max_tokens, len(shortest.tokens))
    at, ending = start.deep_copy(), BudgetedEnd.of(shortest, proposals, growth)
    said: list[int] = []
    for num_left in range(max_tokens, 0, -1):
        if leaves.random() < comes_back:
            at, ending = start.deep_copy(), BudgetedEnd.of(shortest, proposals, growth)
            assert ENDS.recall(ending, at, said, max_tokens)
        bits = np.empty(-(-SIZE // 32), dtype=np.int32)
        at.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        is_last = ENDS.restrict(ending, at, bits, num_left)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE]).tolist()
        assert allowed, (b"".join(TOKENS[token] for token in said), at.get_error())
        token = rng.choice(allowed)
        if token in (EOS, EOS + 1):
            break
        said.append(token)
        assert at.consume_token(token)
        ending.last = token
        if is_last:
            break
    return b"".join((TOKENS + SPECIAL)[token] for token in said)


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_answers_are_valid_wherever_they_are_cut(name: str) -> None:
    schema = SCHEMAS[name]
    grammar, validator = grammar_of(schema), jsonschema.Draft202012Validator(schema)
    for seed, max_tokens in (("1", 40), ("2", 70)):
        text = answer(grammar, f"{name} {seed}", max_tokens)
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", ["strings", "all integers", "a tuple"])
def test_an_answer_is_the_same_when_its_row_was_left(name: str) -> None:
    grammar = grammar_of(SCHEMAS[name])
    assert answer(grammar, name, 50, comes_back=0.1) == answer(grammar, name, 50)


def following(schema: object, text: str) -> set[bytes]:
    """Single bytes that may follow a text."""
    at = matcher_of(grammar_of(schema))
    assert at.consume_tokens(list(text.encode())), at.get_error()
    return {TOKENS[byte] for byte in range(33, 127) if at.validate_tokens([byte])}


@pytest.mark.parametrize(
    ("items", "text", "token"),
    [
        (WORD, '["a","a', '"'),
        (WORD, '["é","é', '"'),
        (WORD, '["\\n","\\n', '"'),
        (WORD, '["\\u001f","\\u001F', '"'),
        ({"type": "number"}, "[1,1", ","),
        ({"type": "number"}, "[1,1.0", "]"),
        ({"type": "number"}, "[0.5,0.50", "]"),
        ({"type": "number"}, "[0,-0.0", "]"),
        ({"type": "number"}, "[10,1", "e"),
        ({}, "[true,tru", "e"),
        ({}, '[{"a":1,"b":[2]},{"b":[2.0],"a":1', "}"),
        ({}, "[[1],[1", "]"),
    ],
)
def test_an_item_that_equals_another_is_not_completed(items: object, text: str, token: str) -> None:
    assert token.encode() not in following({**ARRAY, "items": items}, text)


@pytest.mark.parametrize(
    ("items", "text", "token"),
    [
        (WORD, '["a","ab', '"'),
        (WORD, '["a","A', '"'),
        ({}, '["1",1', "]"),
        ({}, "[true,1", "]"),
        ({}, "[false,0", "]"),
        ({"type": "number"}, "[1,10", "]"),
        ({}, "[[1],[[1]", "]"),
        ({}, '[{"a":1},{"a":2', "}"),
    ],
)
def test_an_item_that_differs_is_completed(items: object, text: str, token: str) -> None:
    assert token.encode() in following({**ARRAY, "items": items}, text)


def test_a_beginning_that_leads_only_to_earlier_items_is_not_written() -> None:
    names = {**ARRAY, "items": {"enum": ["ab", "ac", "b", "c", "d", "e"]}}
    assert following(names, '["ab","ac","') == {b"b", b"c", b"d", b"e"}
    assert following(names, '["ab","') == {b"a", b"b", b"c", b"d", b"e"}
    assert following(names, '["ab","ac","b","c","d","e"') == {b"]"}
    ages = {**ARRAY, "items": {"type": "integer", "minimum": 3, "maximum": 10_003}}
    assert b"1" in following(ages, "[10,") and following(ages, "[10003,1000") == {b"0", b"1", b"2", b",", b"]"}


NUMBERS_IN_TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object", "properties": {"a": {**ARRAY, "items": WORD}}}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {**ARRAY, "items": {"type": "integer"}}, "end": ""},
        {"begin": "<f=c>", "schema": {"type": "string"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def takes(grammar: str, text: str) -> bool:
    at = matcher_of(grammar)
    assert isinstance(at, GuardedMatcher)
    return at.consume_tokens(list(text.encode())) and at.is_accepting()


def test_items_differ_between_tags_and_nowhere_else() -> None:
    contents = [
        {"begin": tag["begin"], "content": {"type": "json_schema", "json_schema": tag["schema"]}, "end": tag["end"]}
        for tag in NUMBERS_IN_TAGS["structures"]
        if isinstance(tag, dict)
    ]
    form = {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": contents}}
    for tags in (NUMBERS_IN_TAGS, form):
        grammar = build_wish({"structural_tag": tags}, VOCABULARY).grammar
        for text in (
            "[1,1]",
            '[1,1]<f=a>{"a":["p","q"]}</f>[1,1]<f=b>[1,2] [1,1]',
            '<f=c>"[1,1]"</f><f=b>[3, 1]',
            "<f=b>[1,2]<f=b>[1,2]",
            "<f<f=b>[]",
        ):
            assert takes(grammar, text), text
        for text in (
            'x<f=a>{"a":["p","p"]}</f>',
            '<f=c>"x"</f><f=b>[3, 3]',
            "<f=b>[1,2]<f=b>[2,2]",
            "<<f=b>[1,1]",
        ):
            assert not takes(grammar, text), text


def test_items_differ_in_a_grammar_that_is_a_schema_between_texts() -> None:
    schema = json.dumps({**ARRAY, "items": {"type": "integer"}})
    for grammar, before, after in (
        (f"start: %json {schema}", "", ""),
        (f'start: "<a>" "\\n" %json {schema} "</a>"\n', "<a>\n", "</a>"),
    ):
        built = build_wish({"grammar": grammar}, VOCABULARY).grammar
        assert takes(built, f"{before}[1,2]{after}") and not takes(built, f"{before}[1,1]{after}")


@pytest.mark.parametrize(
    "wish",
    [
        {"grammar": 'start: a | "x"\na: %json {"type": "array", "items": {"type": "integer"}, "uniqueItems": true}'},
        {"structural_tag": {**NUMBERS_IN_TAGS, "structures": [*NUMBERS_IN_TAGS["structures"], {"begin": "<f=bc>", "schema": {}, "end": ""}, {"begin": "<f=b", "schema": {}, "end": ""}]}},
        {"structural_tag": {"structures": [{"begin": "<|call|>", "schema": {**ARRAY, "items": WORD}, "end": ""}], "triggers": ["<|call|>"]}},
    ],
    ids=["a choice of rules", "a beginning of another", "a control token"],
)  # fmt: skip
def test_where_a_value_cannot_be_followed_uniqueness_is_refused_by_name(wish: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=r"'uniqueItems'.* within a grammar or tags: leave it out"):
        build_wish(wish, VOCABULARY)


def test_tokens_that_span_items_are_looked_at() -> None:
    """The token `","` completes an item, and begins the next."""
    at = matcher_of(grammar_of({**ARRAY, "items": {"enum": ["a", "b", "c", "d", "e", "f"]}}))
    span = TOKENS.index(b'","')
    assert at.consume_tokens(list(b'["a","b')) and at.validate_tokens([span]) == 1
    assert at.consume_tokens([span, *b'c","d","e","f']) and at.validate_tokens([span]) == 0
    other = matcher_of(grammar_of({**ARRAY, "items": WORD}))
    assert other.consume_tokens(list(b'["')) and other.validate_tokens([span]) == 1
    assert other.consume_tokens([span]) and other.validate_tokens([span]) == 0  # "" again


def test_arrays_elsewhere_and_lists_without_the_keyword_are_free() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}, "b": {**ARRAY, "items": WORD}}}
    assert b"]" in following(schema, '{"a":[1,1')
    assert b'"' not in following(schema, '{"a":[1,1],"b":["x","x')
    unmarked = grammar_of({"type": "array", "items": {"enum": ["uniqueItems"]}})
    assert not isinstance(matcher_of(unmarked), GuardedMatcher)


def test_a_frame_of_texts_and_control_tokens_is_followed_and_repeats() -> None:
    frame = ("<|call|>\n", "\n;")
    built = build_framed({**ARRAY, "items": WORD}, frame, VOCABULARY, can_repeat=True, field=FIELD)
    at = matcher_of(built.grammar)
    assert at.consume_tokens([CALL, *b'\n["a","b"]\n;', CALL, *b'\n["a","b'])
    assert at.validate_tokens([*b'","b"']) == 4  # each frame has an array of its own
    at = matcher_of(built.grammar)
    assert at.consume_tokens([CALL, *b'\n["a","a']) and not at.validate_tokens([*b'"'])


def test_an_array_that_cannot_have_that_many_items_ends_with_a_reason() -> None:
    at = matcher_of(grammar_of({**ARRAY, "items": {"const": "a"}, "prefixItems": [{"const": "a"}], "minItems": 2}))
    assert not at.consume_tokens(list(b'["a","a"'))
    assert at.is_stopped() and at.get_error() == STUCK
    assert at.reset() and not at.is_stopped()
