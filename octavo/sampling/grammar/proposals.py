"""Proposals: texts that may bring an answer nearer to its end where nothing can be closed: the shortest values of a grammar's schemas,
their members from each character of a name on, and ends of strings by its patterns.

A member that a schema requires comes first, because an end needs it anyway; then the shortest text that the grammar takes. The search
for ends would otherwise take the first way that closes, through members that nothing requires. All of them are only proposals: the
grammar decides which of them fit."""

import json
from collections.abc import Callable, Iterable, Sequence

from octavo.sampling.grammar.matcher import Matcher
from octavo.sampling.grammar.pattern_ends import ends_of_grammar
from octavo.sampling.grammar.schema_places import marked_schema
from octavo.sampling.grammar.shortest_text import parts_of_grammar

Spell = Callable[[bytes], list[int]]
"""The fewest tokens of a text. Empty: none spell it."""

_NUMBERS = 64  # that are tried for items that must differ
_MAX_CHARACTERS = 60_000  # of all proposals
_DIGITS = b"0123456789"
_AFTER_NUMBER = b",]}"


class Proposals:
    """Of one grammar. `single`: byte → its token."""

    def __init__(self, texts: Iterable[Iterable[bytes]], single: dict[int, int], spell: Spell) -> None:
        self._single, self._spell = single, spell
        # Per group: first byte → its first two bytes → texts, the shortest first.
        self._groups: list[dict[int, dict[bytes, list[bytes]]]] = []
        self._tokens: dict[bytes, list[int]] = {}
        num_left = _MAX_CHARACTERS
        for group in texts:
            index: dict[int, dict[bytes, list[bytes]]] = {}
            for text in sorted(dict.fromkeys(group), key=len):
                num_left -= len(text)
                if num_left < 0:
                    break
                if text and all(byte in single for byte in text):
                    index.setdefault(text[0], {}).setdefault(text[:2], []).append(text)
            self._groups.append(index)

    def first(self, matcher: Matcher, longest: int) -> list[int]:
        """The tokens of the first proposal that the grammar takes. Empty: it takes none of at most `longest` tokens."""
        may_begin: dict[int, bool] = {}
        for index in self._groups:
            found: list[bytes] = []
            for byte, pairs in index.items():
                if byte not in may_begin:
                    may_begin[byte] = matcher.validate_tokens([self._single[byte]]) == 1
                if may_begin[byte]:
                    for pair, texts in pairs.items():
                        if len(pair) == 1 or self._takes(matcher, pair):
                            found += texts
            for text in sorted(found, key=len):
                if self._takes(matcher, text) and 0 < len(tokens := self._tokens_of(text)) <= longest:
                    # A number may have to go on: 0 is no end where 0.5 is due.
                    if text[-1] not in _DIGITS or self._ends_number(matcher, tokens):
                        return tokens
        return []

    def _takes(self, matcher: Matcher, text: bytes) -> bool:
        return matcher.validate_tokens([self._single[byte] for byte in text]) == len(text)

    def _ends_number(self, matcher: Matcher, tokens: list[int]) -> bool:
        after = matcher.deep_copy()
        if not after.consume_tokens(tokens):
            return False
        return after.is_accepting() or any(
            after.validate_tokens([self._single[sign]]) for sign in _AFTER_NUMBER if sign in self._single
        )

    def _tokens_of(self, text: bytes) -> list[int]:
        if text not in self._tokens:
            self._tokens[text] = self._spell(text)
        return self._tokens[text]


def proposals_of(grammar: str, single: dict[int, int], spell: Spell) -> Proposals:
    ends = [_inside(end) + b'"' for end in ends_of_grammar(grammar)]
    values, required, optional = parts_of_grammar(grammar)
    if marked_schema(grammar) is not None:  # the shortest ones may be taken by earlier items
        ends += [b"%d%c" % (number, sign) for number in range(_NUMBERS) for sign in b"]},"]
        ends += [b'"%c":%b}' % (name, value) for name in b"abcdef" for value in (b"0", b'""', b"[]", b"{}", b"true")]
    whole = [value.encode() for value in values]
    return Proposals((_tails(required), [*ends, *whole], _tails(optional)), single, spell)


def _tails(members: Sequence[tuple[str, str]]) -> list[bytes]:
    """The members, from each character of their names on."""
    found = []
    for name, value in members:
        begun, rest = _inside(name), b'":' + value.encode()
        found += [b'"' + begun + rest, *(begun[at:] + rest for at in range(len(begun) + 1))]
    return found


def _inside(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")
