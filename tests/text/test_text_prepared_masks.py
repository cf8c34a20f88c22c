"""Masks that are composed of prepared ones are the masks that looking at each token gives, and patterns that are written for them mean
what the compiler's own formats mean."""

import json
import random
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from octavo.errors import Field
from octavo.text.grammar.build import grammar_of, schema_grammar
from octavo.text.tokenize.vocabulary import Vocabulary

WORDS = ["the", "gmail", "Name", "x9", " of", " big words", "com", "example", "constitutionally", "abcdefghijklmnopqrst", "A-b", "-a", ".c",
         "@", "@b.", "a@", "..", '",', '"}', "_id", "ab_", "  ", "é", "\\n", "10", "255", "1234567", "[1", "].", "9]", "snake_case", "Zz top"]  # fmt: skip
TOKENS = [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS), b"<|end|>"]
EOS = len(TOKENS) - 1
QUOTE = ord('"')
VOCABULARY = Vocabulary(len(TOKENS), TOKENS.__getitem__, frozenset({EOS}), (EOS,))
PREPARED = VOCABULARY.tokenizer(len(TOKENS))
SINGLY = PREPARED.with_slices([])


def masks(tokenizer: LLTokenizer, grammar: str, tokens: Iterator[int]) -> Iterator[bytes]:
    """The masks of a grammar before each of these tokens, as long as it allows them."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    for token in tokens:
        assert not matcher.is_error(), matcher.get_error()
        yield matcher.compute_bitmask()
        if matcher.is_stopped() or not matcher.consume_token(token):
            return


def tokens_of(grammar: str, seed: int, num_tokens: int = 60) -> list[int]:
    rng, matcher, found = random.Random(seed), LLMatcher(SINGLY, grammar, log_level=0), []
    for _ in range(num_tokens):
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(EOS) if bits[token // 8] >> token % 8 & 1]
        if not allowed:
            break
        found.append(rng.choice(sorted(allowed, key=lambda token: -len(TOKENS[token]))[: rng.choice((4, 40, 400))]))
        assert matcher.consume_token(found[-1])
    return found


STRINGS = {"type": "string", "pattern": "^[a-z_][a-z0-9_]{0,20}$"}, {"type": "string", "maxLength": 12}, {"type": "string", "format": "email"}  # fmt: skip
GRAMMARS = [
    *(
        schema_grammar({"type": "array", "items": schema, "minItems": 3}, VOCABULARY, field=Field("schema"))
        for schema in STRINGS
    ),
    *(
        grammar_of({"regex": pattern}, VOCABULARY)
        for pattern in ("[a-z ]{20,}!", "[A-Z][a-zA-Z ]{3,40}", "(the|of|[a-z]{2,7}) ?[0-9]*", "[^@ ]+@[^@ ]+")
    ),
]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_prepared_masks_are_those_of_single_tokens(grammar: str) -> None:
    walks = [tokens_of(grammar, seed) for seed in range(12)]
    assert sum(map(len, walks)) > 100
    for tokens in walks:
        assert [*masks(PREPARED, grammar, iter(tokens))] == [*masks(SINGLY, grammar, iter(tokens))]


def test_the_pattern_of_addresses_is_the_compilers_format() -> None:
    ours = schema_grammar({"type": "string", "format": "email"}, VOCABULARY, field=Field("schema"))
    start, _, rest = ours.partition('"pattern": ')
    _, length = json.JSONDecoder().raw_decode(rest)
    theirs = f'{start}"format": "email"{rest[length:]}'
    num_ends = 0
    for seed in range(80):
        tokens = tokens_of(ours if seed % 2 else theirs, seed)
        found = [*masks(PREPARED, ours, iter(tokens))]
        assert found == [*masks(PREPARED, theirs, iter(tokens))]
        num_ends += sum(mask[QUOTE // 8] >> QUOTE % 8 & 1 for mask in found[1:])
    assert num_ends > 20
