"""Forced stretches: what a grammar leaves as the only way to go on, spelled in tokens that may follow, with the white space of the answer."""

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher

from octavo.errors import Field
from octavo.sampling.grammar.forced import Forced, Spacing
from octavo.sampling.grammar.guarded_matcher import TokenKinds
from octavo.sampling.grammar.mask_slots import MaskSlots
from octavo.sampling.grammar.matching import Matching, SharedVocabulary
from octavo.sampling.grammar.protocol import Begin, Enter, Fill, RowToFill
from octavo.text.grammar.build import schema_grammar
from octavo.text.grammar.limits import parser_limits
from tests.walks import EOS, SIZE, SPECIAL, TOKENS, VOCABULARY

BEGIN = Begin([*TOKENS, *SPECIAL], tuple(range(EOS, SIZE)), (EOS, EOS + 1), SIZE, 4, 1, 10.0, 2.0, 2**30)
TOKENIZER = VOCABULARY.tokenizer(SIZE)
FORCED = Forced(TokenKinds(VOCABULARY, SIZE), [EOS, EOS + 1])
PERSON = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 8},
        "is_here": {"type": "boolean"},
        "place": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"], "additionalProperties": False},
    },
    "required": ["full_name", "is_here", "place"],
    "additionalProperties": False,
}  # fmt: skip
GRAMMAR = schema_grammar(PERSON, VOCABULARY, field=Field("schema"))
STYLES = [{}, {"indent": 2}, {"indent": 4}, {"separators": (",", ":")}]


def stretch(matcher: LLMatcher, spacing: Spacing, most: int = 99) -> list[int]:
    bits = np.zeros(-(-SIZE // 32), dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    found = FORCED.tokens(matcher, bits, spacing, most)
    again = np.zeros_like(bits)
    matcher.unsafe_compute_mask_ptr(again.ctypes.data, again.nbytes)
    assert found is not None and (bits == again).all(), "the matcher is where it was"
    return found


def at(text: bytes) -> tuple[LLMatcher, Spacing]:
    """The grammar behind a text, byte by byte."""
    matcher, spacing = LLMatcher(TOKENIZER, GRAMMAR, log_level=0, limits=parser_limits()), Spacing()
    assert matcher.consume_tokens(list(text)), text
    spacing.add(text)
    return matcher, spacing


def spelled(tokens: list[int]) -> bytes:
    return b"".join(VOCABULARY.spell(token) for token in tokens)


@pytest.mark.parametrize("style", STYLES, ids=str)
def test_names_and_punctuation_of_a_second_object_are_written_as_those_of_the_first(style):
    """Behind the value of the first member the way to the next value is known, with the white space that the answer has."""
    person = {"full_name": "Ann", "is_here": True, "place": {"town": "Rome"}}
    text = json.dumps(person, **style).encode()
    behind = text.index(b'"Ann"') + len(b'"Ann"')
    if style.get("separators"):
        assert spelled(stretch(*at(text[:behind]))) == b', "is_here":', "as most models write it, until it is known"
        matcher, spacing = at(text[: text.index(b"true") + 4])
        assert spelled(stretch(matcher, spacing)) == b',"place":{"town":"'
    else:
        assert text[behind:].startswith(spelled(stretch(*at(text[:behind]))))
        assert b'"is_here":' in spelled(stretch(*at(text[:behind])))
        rest = spelled(stretch(*at(text[: text.index(b"true") + 4])))
        assert text[text.index(b"true") + 4 :].startswith(rest) and rest.endswith(b'"town": "')


def test_nothing_is_forced_where_there_is_a_choice():
    for text in (b'{"full_name": "A', b'{"full_name": "Ann", "is_here": ', json.dumps({"full_name": "A", "is_here": False, "place": {"town": ""}}).encode()):  # fmt: skip
        assert stretch(*at(text)) == []
    assert spelled(stretch(*at(b'{"full_name": "12345678'))).startswith(b'", "is_here"'), "the text can be no longer"
    assert spelled(stretch(*at(b'{"full_name": "A", "is_here": f'))).startswith(b"alse, "), (
        "a literal, and what follows"
    )


def test_a_stretch_is_cut_to_what_is_wanted():
    matcher, spacing = at(b"")
    assert len(stretch(matcher, spacing, 3)) == 3
    assert spelled(stretch(matcher, spacing)) == b'{"full_name": "'


def test_stretches_may_follow_wherever_an_answer_is():
    """Random answers: every token of a stretch is allowed behind those before it, and a walk along stretches ends in a valid answer."""
    rng, num_forced = random.Random(5), 0
    for _ in range(30):
        matcher, spacing, text = *at(b""), b""
        for _ in range(200):
            if matcher.is_accepting():
                break
            found = stretch(matcher, spacing)
            assert matcher.validate_tokens(found) == len(found)
            if not found or rng.random() < 0.2:
                bits = np.zeros(-(-SIZE // 32), dtype=np.int32)
                matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
                allowed = [token for token in range(EOS) if bits[token // 32] >> token % 32 & 1]
                ends = [token for token in allowed if b'"' in TOKENS[token]]
                found = [rng.choice(ends if ends and rng.random() < 0.3 else allowed)]
            else:
                num_forced += len(found)
            assert matcher.consume_tokens(found)
            spacing.add(spelled(found))
            text += spelled(found)
        else:
            continue  # it never ended
        assert set(json.loads(text)) == {"full_name", "is_here", "place"}
    assert num_forced > 300


def test_a_row_is_told_what_is_forced_and_goes_on_as_if_it_had_not_asked():
    def filled(num_forced: int) -> tuple[list[list[int]], list[bytes]]:
        slots = MaskSlots(SIZE, 4)
        matching = Matching(SharedVocabulary(BEGIN), slots, lambda seconds: None)
        assert not matching.compile(GRAMMAR).error
        matching.enter(Enter(1, 0, [EOS], 5, 0, 300, False, True))
        told, masks, new = [], [], []
        for length, token in enumerate([*b'{"full_name": "Ann", "is_here": true', -1], 5):
            rows = matching.fill(Fill([RowToFill(1, new, length, num_forced=num_forced)])).rows
            told.append(rows[0].forced if rows else [])
            masks.append(slots.mask(0).tobytes())
            new = [token]
        return told, masks

    told, masks = filled(15)
    assert spelled(told[0]) == b'{"full_name": "' and len(told[0]) <= 15
    assert told[16] == [] and spelled(told[-1]).startswith(b', "place"')
    nothing, same = filled(0)
    assert not any(nothing) and same == masks


def test_nothing_is_proposed_near_the_rows_limit():
    """There the end of the answer decides what may follow."""
    matching = Matching(SharedVocabulary(BEGIN), MaskSlots(SIZE, 4), lambda seconds: None)
    assert not matching.compile(GRAMMAR).error
    matching.enter(Enter(1, 0, [EOS], 5, 0, 60, False, True))
    rows = matching.fill(Fill([RowToFill(1, [], 5, num_forced=15)])).rows
    assert not rows or not rows[0].forced


def test_a_long_constant_costs_little_and_is_drafted_in_parts():
    """What a client makes long takes no longer: a stretch is cut, and a row that has waited once looks again after a pause."""
    schema = {"type": "object", "properties": {"a": {"const": "z" * 20_000}}, "required": ["a"], "additionalProperties": False}  # fmt: skip
    matching = Matching(SharedVocabulary(BEGIN), MaskSlots(SIZE, 4), lambda seconds: None)
    assert not matching.compile(schema_grammar(schema, VOCABULARY, field=Field("schema"))).error
    matching.enter(Enter(1, 0, [EOS], 5, 0, 60_000, False, True))
    new: list[int] = []
    num_drafts = 0
    for length, token in enumerate([*b'{"a": "', *[ord("z")] * 300], 5):
        rows = matching.fill(Fill([RowToFill(1, new, length, num_forced=15)])).rows
        new = [token]
        if rows and rows[0].forced:
            assert len(rows[0].forced) <= 15 and not rows[0].failure
            num_drafts += 1
    assert num_drafts > 3
    row = matching._rows[1]
    assert row.credit > 0 and row.spacing.num_bytes < 400


def test_long_white_space_is_neither_kept_nor_guessed():
    spacing = Spacing()
    for _ in range(3):
        spacing.add(b'{"a":' + b" " * 50_000 + b'"x",' + b"\n" * 50_000)
    assert len(spacing.before(b'"')) <= 64 and max(map(len, spacing._seen.values())) <= 64
