"""Proposals: texts that may bring an answer nearer to its end where nothing can be closed: the shortest values of a grammar's schemas,
their members from each character of a name on, and ends of strings by its patterns.

A member that a schema requires comes first, because an end needs it anyway; then the shortest text that the grammar takes. The search
for ends would otherwise take the first way that closes, through members that nothing requires. All of them are only proposals: the
grammar decides which of them fit."""

import functools
import json
from collections.abc import Callable, Sequence

from octavo.sampling.grammar.grammar_schemas import schemas_of
from octavo.sampling.grammar.guarded_matcher import compiled_part
from octavo.sampling.grammar.matcher import Matcher
from octavo.sampling.grammar.pattern_ends import ends_of_grammar
from octavo.sampling.grammar.schema_places import framed_schema, marked_schemas
from octavo.sampling.grammar.shortest_text import parts_of_grammar

Spell = Callable[[bytes], list[int]]
"""The fewest tokens of a text. Empty: none spell it."""

_NUMBERS = 64  # that are tried for items that must differ
_MAX_CHARACTERS = 400_000  # of all proposals
_MEASURED = 60  # names whose tokens are counted
_AFTER_VALUE = b",]}"


Groups = list[list[bytes]]
"""Texts that complete strings, then groups of others, of which the first that has a fitting one is taken."""


class Proposals:
    """Of one grammar. `groups` is called when the first proposal is wanted: many answers end without one. `single`: byte → its token."""

    def __init__(
        self, groups: Callable[[], Groups], single: dict[int, int], spell: Spell, has_places: bool = False
    ) -> None:
        """`has_places`: what comes at one place of an array may decide whether it may end there (`contains`)."""
        self._make_groups, self._single, self.spell, self._has_places = groups, single, spell, has_places
        self._tokens: dict[bytes, list[int]] = {}

    @functools.cached_property
    def _groups(self) -> list[dict[int, dict[bytes, list[bytes]]]]:
        """Per group: first byte → its first two bytes → texts, the shortest first."""
        found: list[dict[int, dict[bytes, list[bytes]]]] = []
        num_left, known = _MAX_CHARACTERS, bytes(self._single)
        for group in self._make_groups():
            index: dict[int, dict[bytes, list[bytes]]] = {}
            for text in sorted(dict.fromkeys(group), key=len):
                num_left -= len(text)
                if num_left < 0:
                    break
                if text and not text.translate(None, known):
                    index.setdefault(text[0], {}).setdefault(text[:2], []).append(text)
            found.append(index)
        return found

    def first(self, matcher: Matcher, longest: int, is_text: bool) -> list[int]:
        """The tokens of the first proposal that the grammar takes. `is_text`: within a string. Empty: it takes none of at most
        `longest` tokens."""
        may_begin: dict[int, bool] = {}
        compiled = compiled_part(matcher)  # asking a guard too takes longer
        for index in self._groups[:1] if is_text else self._groups:
            found: list[bytes] = []
            for byte, pairs in index.items():
                if byte not in may_begin:
                    may_begin[byte] = compiled.validate_tokens([self._single[byte]]) == 1
                if may_begin[byte]:
                    for pair, texts in pairs.items():
                        if len(pair) == 1 or self._takes(compiled, pair):
                            found += texts
            first: list[int] = []
            for text in sorted(found, key=len):
                if (
                    self._takes(compiled, text)
                    and (compiled is matcher or self._takes(matcher, text))
                    and 0 < len(tokens := self._tokens_of(text)) <= longest
                    # A number may have to go on, as 0 where 0.5 is due, and a string may hold the same characters.
                    and (not text[-1:].isalnum() or self._is_whole(matcher, tokens))
                ):
                    if not self._has_places or self._ends_array(compiled, tokens):
                        return tokens
                    first = first or tokens
            if first:
                return first
        return []

    def _ends_array(self, matcher: Matcher, tokens: list[int]) -> bool:
        """Whether an array may end after these tokens, or does not need more because of them."""
        close, more = (self._single.get(sign, -1) for sign in b"],")
        return matcher.validate_tokens([*tokens, close]) > len(tokens) or (
            matcher.validate_tokens([*tokens, more]) == len(tokens)
        )

    def _takes(self, matcher: Matcher, text: bytes) -> bool:
        return matcher.validate_tokens([self._single[byte] for byte in text]) == len(text)

    def _is_whole(self, matcher: Matcher, tokens: list[int]) -> bool:
        after = matcher.deep_copy()
        if not after.consume_tokens(tokens):
            return False
        return after.is_accepting() or any(
            after.validate_tokens([self._single[sign]]) for sign in _AFTER_VALUE if sign in self._single
        )

    def _tokens_of(self, text: bytes) -> list[int]:
        if text not in self._tokens:
            self._tokens[text] = self.spell(text)
        return self._tokens[text]


def tokens_per_character(grammar: str, spell: Spell) -> float:
    """Measured with the names of a grammar's properties. 0: it has none."""
    names: list[str] = []
    waiting: list[object] = [*schemas_of(grammar)]
    while waiting and len(names) < _MEASURED:
        match waiting.pop():
            case {"properties": dict(listed), **rest}:
                names += listed
                waiting += [*rest.values(), *listed.values()]
            case dict() as part:
                waiting += part.values()
            case list() as parts:
                waiting += parts
    sample = "".join(f'"{name}":0,' for name in names[:_MEASURED]).encode("utf-8", "ignore")
    return len(spell(sample)) / len(sample) if sample else 0.0


def proposals_of(grammar: str, single: dict[int, int], spell: Spell) -> Proposals:
    has_places = '"prefixItems": [' in grammar and '"anyOf": [' in grammar
    return Proposals(functools.partial(_groups_of, grammar), single, spell, has_places)


def _groups_of(grammar: str) -> Groups:
    ends = [_inside(end) + b'"' for end in ends_of_grammar(grammar)]
    values, required, optional = parts_of_grammar(grammar)
    groups = [ends, _frame(grammar), _tails(required), [value.encode() for value in values]]
    if marked_schemas(grammar):  # the shortest ones may be taken by earlier items
        numbers = [b"%d%c" % (number, sign) for number in range(_NUMBERS) for sign in b"]},"]
        members = [b'"%c":%b}' % (name, value) for name in b"abcdef" for value in (b"0", b'""', b"[]", b"{}", b"true")]
        groups.append([*numbers, *members])
    return [*groups, _tails(optional)]


def _frame(grammar: str) -> list[bytes]:
    """What stands behind a schema's value, from each character on. A token of the model's own may also begin the next frame (`><`)."""
    framed = framed_schema(grammar)
    after = "".join(part for part in framed.after if isinstance(part, str)) if framed is not None else ""
    return [after[at:].encode() for at in range(len(after))]


def _tails(members: Sequence[tuple[str, str]]) -> list[bytes]:
    """The members, from each character of their names on."""
    found = []
    for name, value in members:
        begun, rest = _inside(name), b'":' + value.encode()
        found += [b'"' + begun + rest, *(begun[at:] + rest for at in range(len(begun) + 1))]
    return found


def _inside(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")
