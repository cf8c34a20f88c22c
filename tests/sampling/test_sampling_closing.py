"""Answers that are ended before max_tokens cuts them: in time, within their grammar, and alike wherever their row has been."""

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher

from octavo.sampling.closing import Closing, Ends
from octavo.text.grammar import schema_grammar
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


def test_the_end_that_is_looked_for_is_short() -> None:
    """A comma that is due is no detour; space would be one."""
    found = Ends(VOCABULARY, SIZE)._find(matcher())
    assert found is not None and b"".join(TOKENS[token] for token in found) == b'{"names":[],"size":0}'
