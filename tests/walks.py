"""Random walks through a grammar: any tokens that its masks allow, one by one, until it may end and
does. Chance stands in for a model."""

import random
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher

from octavo.text.tokenize.vocabulary import Vocabulary

# Beside all bytes: tokens that end in one part of JSON and begin the next, and pieces of characters.
_MERGED = ['":', '": ', '","', '{"', '"}', "},", "null", "true", "fals", ' "', "00", "12", "a1", "\\", "\\u00", "1e", "-0", "[[",
           "]]", "[]", "{}", '"]', "\n  ", "kind", "é", "😀", "\\n", ".5", "e+", "-2", ":60", "T2"]  # fmt: skip
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(token.encode() for token in _MERGED),
    b"\xc3",
    b"\xf0\x9f",
    b"",
    b"",
]
SPECIAL = [b"<|end|>", b"<|turn|>", b"<|call|>"]
SIZE = len(TOKENS) + len(SPECIAL)
EOS = len(TOKENS)
CALL = EOS + 2
VOCABULARY = Vocabulary(SIZE, (TOKENS + SPECIAL).__getitem__, frozenset(range(EOS, SIZE)), (EOS, EOS + 1))
_TOKENIZER = VOCABULARY.tokenizer(SIZE)
_CLOSING = {b'"', b"}", b"]", b'"}', b'"]', b"]]", b"[]", b"{}"}


class Walk(NamedTuple):
    text: bytes
    ended: bool  # else it was cut off


def walk(grammar: str, seed: str, max_tokens: int = 250) -> Walk:
    """Walk and close open parts rather soon, so that most walks end."""
    rng, matcher, text = random.Random(seed), LLMatcher(_TOKENIZER, grammar, log_level=0), b""
    for step in range(max_tokens):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")[:SIZE]
        assert not matcher.is_stopped() or matcher.stop_reason() in ("NoExtension", "EndOfSentence"), (
            matcher.get_error()
        )
        ids = [int(token) for token in np.flatnonzero(bits) if token not in (EOS, EOS + 1)]
        if bits[EOS] and (not ids or rng.random() < 0.3):
            return Walk(text, True)
        assert ids, f"nothing can follow {text!r}"
        weights = [(4 + step / 4 if token < EOS and TOKENS[token] in _CLOSING else 1) for token in ids]
        token = rng.choices(ids, weights)[0]
        assert token >= EOS or TOKENS[token], "a token that adds nothing"
        assert matcher.consume_token(token), matcher.get_error()
        text += (TOKENS + SPECIAL)[token]
    return Walk(text, False)
