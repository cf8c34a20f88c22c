"""Answers that are ended before max_tokens cuts them: in time, within their grammar, and independent of preemptions."""

import json
import random
import re

import numpy as np
import pytest
from llguidance import LLMatcher

from octavo.errors import Field
from octavo.sampling.grammar.budgeted_end import BudgetedEnd, Ends
from octavo.sampling.grammar.growth import growth_of_grammar
from octavo.sampling.grammar.guarded_matcher import TokenKinds
from octavo.sampling.grammar.shortest_completion import ShortestCompletion
from octavo.text.grammar.build import grammar_of, schema_grammar
from tests.walks import EOS, SIZE, TOKENS, VOCABULARY

SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}}, "size": {"type": "integer"}},
    "required": ["names", "size"],
    "additionalProperties": False,
}
TOKENIZER = VOCABULARY.tokenizer(SIZE)
ENDS, KINDS = Ends(VOCABULARY, SIZE), TokenKinds(VOCABULARY, SIZE)


def matcher(schema: object = SCHEMA) -> LLMatcher:
    return LLMatcher(TOKENIZER, schema_grammar(schema, VOCABULARY, field=Field("schema")), log_level=0)


def answer(
    seed: int,
    max_tokens: int,
    comes_back: float,
    start: LLMatcher | None = None,
    shortest: ShortestCompletion | None = None,
) -> bytes:
    """A random answer; `comes_back`: the probability, per token, that all state but the tokens is lost, as by a preemption."""
    start = start or matcher()
    rng, ends, closing, at, said = random.Random(seed), ENDS, BudgetedEnd.of(shortest), start.deep_copy(), []
    leaves = random.Random(-seed)
    for left in range(max_tokens, 0, -1):
        if leaves.random() < comes_back:
            closing, at = BudgetedEnd.of(shortest), start.deep_copy()
            assert ends.recall(closing, at, said, max_tokens)
        bits = np.full(-(-SIZE // 32), -1, dtype=np.int32)
        at.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        is_last = ends.restrict(closing, at, bits, left)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE])
        token = int(rng.choice(allowed.tolist()))
        if token >= EOS:
            break
        said.append(token)
        assert at.consume_token(token)
        closing.last = token
        if is_last:
            break
    return b"".join(TOKENS[token] for token in said)


@pytest.mark.parametrize("max_tokens", [40, 90, 230])
def test_an_answer_ends_in_time_and_alike_when_its_row_was_left(max_tokens: int) -> None:
    texts = [answer(seed, max_tokens, 0) for seed in range(8)]
    for text in texts if max_tokens > 40 else ():  # with little room for an end, an answer may be cut
        assert set(json.loads(text)) == {"names", "size"}
    assert [answer(seed, max_tokens, 0.2) for seed in range(8)] == texts


FORM = {"type": "object", "properties": {f"{'abcdefghij'[n % 10]}{n}": {"type": "string"} for n in range(60)},
        "required": [f"{'abcdefghij'[n % 10]}{n}" for n in range(60)], "additionalProperties": False}  # fmt: skip


def test_many_required_parts_are_all_said_where_there_is_room_for_them() -> None:
    """Chance writes into the first fields until it is stopped: looking for the end only 192 tokens before the limit is too late
    for the other fields."""
    start = matcher(FORM)
    shortest = ENDS.shortest(start)
    assert shortest is not None
    least = len(shortest.tokens)
    assert 400 < least < 600
    for max_tokens in (least + 2, shortest.looks_from + 40):
        texts = [answer(seed, max_tokens, 0, start, shortest) for seed in range(4)]
        assert all(json.loads(text).keys() == FORM["properties"].keys() for text in texts)
        assert [answer(seed, max_tokens, 0.01, start, shortest) for seed in range(4)] == texts
    # An answer that does not fit is cut at the limit: shorter fields than the model would write do not help.
    for text in (answer(seed, least - 40, 0, start, shortest) for seed in range(4)):
        with pytest.raises(ValueError):
            json.loads(text)


def test_numbers_between_required_fields_are_left() -> None:
    """A number may continue without end: where nothing closes, the comma after it leads to the end."""
    kinds = [{"type": kind} for kind in ("number", "integer", "string", "boolean", "null")]
    schema = {**FORM, "properties": {name: kinds[n % 5] for n, name in enumerate(FORM["properties"])}}
    start = matcher(schema)
    shortest = ENDS.shortest(start)
    assert shortest is not None and json.loads(b"".join(TOKENS[token] for token in shortest.tokens))
    for text in (answer(seed, shortest.looks_from, 0, start, shortest) for seed in range(3)):
        assert json.loads(text).keys() == FORM["properties"].keys()


def test_what_is_short_is_looked_for_as_late_as_without_preparation() -> None:
    """Answers that take too long to find are not prepared for."""
    short = ENDS.shortest(matcher())
    assert short is not None and BudgetedEnd.of(short).looks_at == BudgetedEnd().looks_at
    assert ENDS.shortest(matcher({"const": "xy" * 60_000})) is None


def words(grammar: str, max_tokens: int, count: int = 60) -> set[tuple[str, bool]]:
    """Random answers, and whether each ended because of its limit."""
    found, ends = set(), Ends(VOCABULARY, SIZE)
    for seed in range(count):
        rng, closing, at, said = random.Random(seed), BudgetedEnd(), LLMatcher(TOKENIZER, grammar, log_level=0), []
        is_limited = True
        for left in range(max_tokens, 0, -1):
            bits = np.full(-(-SIZE // 32), -1, dtype=np.int32)
            at.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            is_last = ends.restrict(closing, at, bits, left)
            token = rng.choice(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE]).tolist())
            if token >= EOS:
                is_limited = is_last
                break
            said.append(token)
            assert at.consume_token(token)
            closing.last = token
            if is_last:
                break
        found.add((b"".join(TOKENS[token] for token in said).decode(), is_limited))
    return found


def test_a_short_answer_is_chosen_and_not_made() -> None:
    """With few tokens left, every choice that still fits is possible; an answer that was cut short is marked."""
    choice = grammar_of({"choice": ["no", "yes", "ok", "perhaps"]}, VOCABULARY)
    assert words(choice, 12) == {("no", False), ("yes", False), ("ok", False), ("perhaps", False)}
    assert words(choice, 4) == {("no", True), ("yes", True), ("ok", True)}  # one of them does not fit
    assert words(choice, 2) == {("no", True), ("ok", True)}
    digits = grammar_of({"regex": "[0-9]{1,9}"}, VOCABULARY)
    for max_tokens in (1, 2, 3, 4):
        texts = words(digits, max_tokens)
        assert len(texts) >= 10 and all(re.fullmatch("[0-9]{1,9}", text) for text, _ in texts)
        assert {is_limited for _, is_limited in texts} == ({True} if max_tokens == 1 else {True, False})
    pairs = grammar_of({"regex": "(ab|cde)*"}, VOCABULARY)
    for max_tokens in (1, 2, 3, 4, 5):
        texts = words(pairs, max_tokens)
        assert all(re.fullmatch("(ab|cde)*", text) for text, _ in texts) and ("ab" in dict(texts) or max_tokens < 2)
    assert words(pairs, 1) == {("", True)}  # nothing fits, and it is not the grammar that ends the answer


def test_texts_that_must_be_long_or_hold_a_certain_character_come_to_an_end() -> None:
    for schema in ({"type": "string", "minLength": 90}, {"type": "string", "format": "email"}):
        at = LLMatcher(TOKENIZER, schema_grammar(schema, VOCABULARY, field=Field("schema")), log_level=0)
        assert Ends(VOCABULARY, SIZE)._find(BudgetedEnd(), at, 120) is not None, schema


@pytest.mark.parametrize(
    "pattern",
    [
        "[a-z]+!",
        "[a-z]+-[0-9]{4}!",
        "(foo|bar)+-x",
        ".*!",
        "[0-9a-f]+:[0-9a-f]+",
        "[a-z]+ [A-Z][a-z]+;",
        "[a-z]+ #[0-9]+[A-F]",
    ],
)
def test_what_may_repeat_for_ever_is_left_in_time(pattern: str) -> None:
    grammar = schema_grammar({"type": "string", "pattern": f"^{pattern}$"}, VOCABULARY, field=Field("schema"))
    for text, _ in words(grammar, 40, count=12):
        assert re.fullmatch(pattern, json.loads(text)), text


def test_a_number_makes_room_for_the_next() -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 6}
    for text, _ in words(schema_grammar(numbers, VOCABULARY, field=Field("schema")), 32, count=12):
        assert len(json.loads(text)) == 6


def test_the_end_that_is_looked_for_is_short() -> None:
    """A required comma is part of the shortest end; a space is not."""
    found = Ends(VOCABULARY, SIZE)._find(BudgetedEnd(), matcher(), 100)
    assert found is not None and b"".join(TOKENS[token] for token in found) == b'{"names":[],"size":0}'


def test_a_text_that_has_to_be_long_harms_no_one() -> None:
    """Copies of a matcher share its lexer, which has a limit: the row's own matcher, and the next row's, must continue to work."""
    schema = {"type": "object", "properties": {"a": {"const": "xy" * 60_000}}, "required": ["a"]}
    base = LLMatcher(TOKENIZER, schema_grammar(schema, VOCABULARY, field=Field("schema")), log_level=0)
    row, bits = base.deep_copy(), np.full(-(-SIZE // 32), -1, dtype=np.int32)
    assert not Ends(VOCABULARY, SIZE).restrict(BudgetedEnd(), row, bits, 150)
    assert row.consume_tokens(list(b'{"a":"xyx')) and base.deep_copy().consume_tokens(list(b'{"a":"xyx'))


PEOPLE = {"type": "array", "minItems": 100, "items": {**SCHEMA, "properties": {**SCHEMA["properties"], "at": {"type": "string", "format": "email"}},
          "required": ["names", "size", "at"]}}  # fmt: skip


def test_little_is_done_where_no_end_is_in_reach() -> None:
    """The search runs beside a step that other rows share, so its work is counted: questions by token, and whole masks."""
    asked = {"tokens": 0, "masks": 0}

    class Counted:
        def __init__(self, matcher: LLMatcher) -> None:
            self._matcher = matcher

        def __getattr__(self, name: str) -> object:
            asked["tokens"] += name in ("validate_tokens", "consume_token")
            asked["masks"] += name == "unsafe_compute_mask_ptr"
            return getattr(self._matcher, name)

        def deep_copy(self) -> "Counted":
            return Counted(self._matcher.deep_copy())

    rng, ends, closing, max_tokens = random.Random(1), Ends(VOCABULARY, SIZE), BudgetedEnd(), 100
    at = LLMatcher(TOKENIZER, schema_grammar(PEOPLE, VOCABULARY, field=Field("schema")), log_level=0)
    for left in range(max_tokens, 0, -1):
        bits = np.full(-(-SIZE // 32), -1, dtype=np.int32)
        at.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        assert not ends.restrict(closing, Counted(at), bits, left)
        assert at.consume_token(
            rng.choice(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE]).tolist())
        )
    assert asked["masks"] < max_tokens and asked["tokens"] < 30 * max_tokens


class CountedMatcher:
    """A matcher that counts the questions to it, and to its copies."""

    def __init__(self, matcher: LLMatcher, asked: list[int]) -> None:
        self._matcher, self._asked = matcher, asked

    def __getattr__(self, name: str) -> object:
        self._asked[0] += name in ("validate_tokens", "consume_token", "consume_tokens", "unsafe_compute_mask_ptr")
        return getattr(self._matcher, name)

    def deep_copy(self) -> "CountedMatcher":
        return CountedMatcher(self._matcher.deep_copy(), self._asked)


def test_an_end_that_is_known_is_followed_and_not_searched_for_at_every_token() -> None:
    """In a list with an end in reach, and room: most tokens of an answer lead along the known end, or away from it and back."""
    schema = {"type": "array", "items": SCHEMA}
    grammar = schema_grammar(schema, VOCABULARY, field=Field("schema"))
    at = LLMatcher(TOKENIZER, grammar, log_level=0)
    proposals = ENDS.proposals(grammar, KINDS.fewest_tokens)
    growth = growth_of_grammar(grammar, KINDS.fewest_tokens)
    closing = BudgetedEnd.of(ENDS.shortest(at, proposals), proposals, growth, is_regular=True)
    said = b'[{"names":["Ann","Bob"],"size":12}, {"names": [],"size": 3},{"names":["Christine"],"size":41},{"names":["D'
    bits, asked, left = np.empty(-(-SIZE // 32), dtype=np.int32), [0], 190
    for byte in said:
        at.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        before = bits.copy()
        assert not ENDS.restrict(closing, CountedMatcher(at, asked), bits, left)
        assert (bits == before).all()
        assert at.consume_token(TOKENS.index(bytes([byte])))
        closing.last, left = TOKENS.index(bytes([byte])), left - 1
    assert asked[0] < 2 * len(said)


@pytest.mark.parametrize(
    "pattern",
    [
        "^.*x$",
        "^.*@example\\.com$",
        "^[a-z]+![0-9]{3}$",
        "^(a|b)*cd$",
        "^\\d{4}-\\d{2}-\\d{2}$",
        "(foo|bar)baz",
        "^[A-Z]{2}:.+;$",
    ],
)
def test_an_answer_with_a_pattern_is_closed_at_its_limit(pattern: str) -> None:
    """Whatever was said before: the shortest end from each state of the pattern is known."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = schema_grammar(schema, VOCABULARY, field=Field("schema"))
    proposals = ENDS.proposals(grammar, KINDS.fewest_tokens)
    for seed in range(12):
        rng, at = random.Random(seed), LLMatcher(TOKENIZER, grammar, log_level=0)
        shortest = ENDS.shortest(at, proposals)
        assert shortest is not None
        closing, said = BudgetedEnd.of(shortest, proposals, growth_of_grammar(grammar, KINDS.fewest_tokens)), b""
        for left in range(len(shortest.tokens) + 5 * (seed % 6), 0, -1):
            bits = np.full(-(-SIZE // 32), -1, dtype=np.int32)
            at.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            is_last = ENDS.restrict(closing, at, bits, left)
            token = rng.choice(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:SIZE]).tolist())
            if token in VOCABULARY.eos_ids:
                break
            said += VOCABULARY.spell(token)
            assert at.consume_token(token)
            closing.last = token
            if is_last:
                break
        assert re.search(pattern, json.loads(said)["a"], re.S), said
