"""Answers that are ended before max_tokens cuts them: in time, within their grammar, and alike wherever their row has been."""

import json
import random
import re

import numpy as np
import pytest
from llguidance import LLMatcher

from octavo.sampling.closing import Closing, Ends
from octavo.text.grammar import grammar_of, schema_grammar
from tests.walks import EOS, SIZE, TOKENS, VOCABULARY

SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}}, "size": {"type": "integer"}},
    "required": ["names", "size"],
    "additionalProperties": False,
}
TOKENIZER = VOCABULARY.tokenizer(SIZE)


def matcher() -> LLMatcher:
    return LLMatcher(TOKENIZER, schema_grammar(SCHEMA, VOCABULARY, param="schema"), log_level=0)


def answer(seed: int, max_tokens: int, comes_back: bool) -> bytes:
    """By chance; `comes_back`: now and then all but the tokens is forgotten, as when a row is left and entered again."""
    rng, ends, closing, at, said = random.Random(seed), Ends(VOCABULARY, SIZE), Closing(), matcher(), []
    leaves = random.Random(-seed)
    for left in range(max_tokens, 0, -1):
        if comes_back and leaves.random() < 0.2:
            closing, at = Closing(), matcher()
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
        if is_last:
            break
    return b"".join(TOKENS[token] for token in said)


@pytest.mark.parametrize("max_tokens", [40, 90, 230])
def test_an_answer_ends_in_time_and_alike_when_its_row_was_left(max_tokens: int) -> None:
    texts = [answer(seed, max_tokens, False) for seed in range(8)]
    for text in texts if max_tokens > 40 else ():  # where there is hardly room for an end, one may be cut
        assert set(json.loads(text)) == {"names", "size"}
    assert [answer(seed, max_tokens, True) for seed in range(8)] == texts


def words(grammar: str, max_tokens: int, count: int = 60) -> set[tuple[str, bool]]:
    """Answers by chance, and whether each ends because of its limit."""
    found, ends = set(), Ends(VOCABULARY, SIZE)
    for seed in range(count):
        rng, closing, at, said = random.Random(seed), Closing(), LLMatcher(TOKENIZER, grammar, log_level=0), []
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
            if is_last:
                break
        found.add((b"".join(TOKENS[token] for token in said).decode(), is_limited))
    return found


def test_a_short_answer_is_chosen_and_not_made() -> None:
    """With hardly any tokens left, all that still fits is left to choose from; and whoever was cut short says so."""
    choice = grammar_of({"choice": ["no", "yes", "ok", "perhaps"]}, VOCABULARY)
    assert words(choice, 12) == {("no", False), ("yes", False), ("ok", False), ("perhaps", False)}
    assert words(choice, 4) == {("no", True), ("yes", True), ("ok", True)}  # one of them had no room
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
    assert words(pairs, 1) == {("", True)}  # no more fits, and it is not the grammar that ends


def test_texts_that_must_be_long_or_hold_a_certain_character_come_to_an_end() -> None:
    for schema in ({"type": "string", "minLength": 90}, {"type": "string", "format": "email"}):
        at = LLMatcher(TOKENIZER, schema_grammar(schema, VOCABULARY, param="schema"), log_level=0)
        assert Ends(VOCABULARY, SIZE)._find(at, 120) is not None, schema


def test_the_end_that_is_looked_for_is_short() -> None:
    """A comma that is due is no detour; space would be one."""
    found = Ends(VOCABULARY, SIZE)._find(matcher(), 100)
    assert found is not None and b"".join(TOKENS[token] for token in found) == b'{"names":[],"size":0}'
