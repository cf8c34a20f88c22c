"""The shortest ways to complete a string that must match a pattern, from every state of the pattern's automaton.

A search for an answer's end tries them where a string cannot be closed yet: `x` for ^.*x$, the rest of a date, the domain of an
address. They are only proposals: the grammar decides which of them fit, so a pattern that is read inexactly here does no harm."""

import functools
import importlib
import re
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from octavo.sampling.grammar.grammar_schemas import schemas_of

_MAX_STATES = 400  # of one automaton, and positions of one pattern
_MAX_ENDS = 192  # proposals of one grammar
_MAX_LENGTH = 64  # characters of a proposal
_MAX_PATTERNS = 64
_PROPERTIES = {
    "L": "a-zA-Z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "N": "0-9",
    "Nd": "0-9",
    "Z": " ",
    "Zs": " ",
    "M": "",
    "P": "!-/",
}
_PIECE = re.compile(r"\\p\{[^}]*\}|\\.|\[|\]|[^\\\[\]]+", re.S)
_TRIED = "a0A-_./:@ xX1zZ" + "".join(map(chr, range(33, 127)))  # characters, in the order in which they are tried
# Simplified: what is proposed for a format is short.
_FORMATS = {
    "email": "[a-z]+@[a-z]+\\.[a-z]{2}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "ipv4": "[0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|::",
    "hostname": "[a-z]+(\\.[a-z]+)*",
    "uri": "[a-z]+:(//)?[a-z]+",
    "duration": "P[0-9]+[DW]",
}

Node = tuple[Any, ...]


def ends_of_grammar(grammar: str) -> list[str]:
    """Proposals for all patterns and formats of the schemas in a grammar, shortest first."""
    patterns: dict[str, None] = {}
    for schema in schemas_of(grammar):
        patterns.update(dict.fromkeys(_patterns(schema)))
    ends: dict[str, None] = {}
    for pattern in list(patterns)[:_MAX_PATTERNS]:
        ends.update(dict.fromkeys(ends_of(pattern)))
    return sorted(ends, key=len)[:_MAX_ENDS]


def _patterns(schema: object) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as part:
                if isinstance(pattern := part.get("pattern"), str):
                    yield pattern
                if isinstance(name := part.get("format"), str) and name in _FORMATS:
                    yield f"^({_FORMATS[name]})$"
                if isinstance(names := part.get("patternProperties"), dict):
                    yield from names
                waiting += part.values()
            case list() as parts:
                waiting += parts


def ends_of(pattern: str) -> list[str]:
    """The shortest ends of strings that match a pattern anywhere, one for each state. Empty: the pattern cannot be read here."""
    automaton = _read(pattern)
    return [] if automaton is None else [*dict.fromkeys(end for end in automaton.ends().values() if end)]


@functools.lru_cache(maxsize=256)
def shortest_match(pattern: str, least: int = 0) -> str | None:
    """The shortest string of at least so many characters that matches a pattern. None: the pattern cannot be read here."""
    automaton = _read(pattern)
    return None if automaton is None else automaton.shortest(least)


def can_match(pattern: str, text: str) -> bool:
    """Whether a text may match a pattern. True where that is not known here."""
    automaton = _kept(pattern)
    return automaton is None or automaton.can_match(text)


@functools.lru_cache(maxsize=64)
def _kept(pattern: str) -> "_Automaton | None":
    return _read(pattern)


def pattern_of_format(name: str) -> str | None:
    return f"^({_FORMATS[name]})$" if name in _FORMATS else None


def _read(pattern: str) -> "_Automaton | None":
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            written = re.sub(r"\\[xu]\{([0-9a-fA-F]+)\}", lambda code: re.escape(chr(int(code[1], 16))), pattern)
            written = re.sub(r"\(\?<(?![=!])", "(?P<", written)  # as ECMAScript names groups
            written = _without_properties(written)
            parsed = importlib.import_module("re._parser").parse(written)  # the standard library's, which is not public
        return _Automaton(parsed)
    except (re.error, RecursionError, OverflowError, _TooLarge, ValueError, KeyError):
        return None


def _without_properties(pattern: str) -> str:
    """A pattern with ASCII characters in place of Unicode's properties. Raises KeyError for others than these."""
    parts, is_inside = [], False
    for piece in _PIECE.findall(pattern):
        if piece.startswith("\\p{"):
            members = _PROPERTIES[piece[3:-1]]
            piece = members if is_inside else f"[{members}]"
        is_inside = piece == "[" or (is_inside and piece != "]")
        parts.append(piece)
    return "".join(parts)


class _TooLarge(Exception):
    pass


class _Automaton:
    """A nondeterministic automaton. Anchors are read as such at the ends of the pattern, and as nothing elsewhere."""

    def __init__(self, parsed: Any) -> None:
        self._empty: list[list[int]] = []  # state → states that need no character
        self._by_set: list[list[tuple[frozenset[str], int]]] = []  # state → (characters of _TRIED, next state)
        items = list(parsed)
        first, self._last = self._state(), self._state()
        is_bound, is_bound_at_end = _is_anchor(items[:1], "AT_BEGINNING"), _is_anchor(items[-1:], "AT_END")
        start = self._state()
        self._empty[first].append(start)
        if not is_bound:
            self._by_set[first].append((frozenset(_TRIED), first))
        if not is_bound_at_end:
            self._by_set[self._last].append((frozenset(_TRIED), self._last))
        self._sequence(items, start, self._last)
        self._first = first

    @property
    def start(self) -> frozenset[int]:
        return self._closed({self._first})

    def ends(self) -> dict[frozenset[int], str]:
        """The shortest end from each set of states."""
        found: dict[frozenset[int], dict[str, frozenset[int]]] = {}
        waiting = [self.start]
        while waiting and len(found) < _MAX_STATES:
            states = waiting.pop()
            if states in found:
                continue
            found[states] = following = self._following(states)
            waiting += following.values()
        best: dict[frozenset[int], str] = {states: "" for states in found if self._last in states}
        level = list(best)
        before: dict[frozenset[int], list[tuple[str, frozenset[int]]]] = {}
        for states, following in found.items():
            for character, after in following.items():
                before.setdefault(after, []).append((character, states))
        while level:
            nearer, level = level, []
            for states in nearer:
                for character, earlier in before.get(states, ()):
                    if earlier not in best and len(best[states]) < _MAX_LENGTH:
                        best[earlier] = character + best[states]
                        level.append(earlier)
        return best

    def shortest(self, least: int) -> str | None:
        """The shortest match of at least so many characters. None: it is too long, or there is none."""
        ends = self.ends()
        if least <= len(ends.get(self.start, "")) or self.start not in ends:
            return ends.get(self.start)
        level = {self.start: ""}  # sets of states after so many characters → one text that leads there
        for _ in range(min(least, _MAX_LENGTH)):
            level = {
                after: text + character
                for states, text in level.items()
                for character, after in self._following(states).items()
                if after in ends
            }
        found = [text + ends[states] for states, text in level.items() if len(text) >= least]
        return min(found, key=len, default=None)

    def can_match(self, text: str) -> bool:
        """Whether a text may match. Takes time in proportion to its length, whatever the pattern."""
        states = self.start
        for character in text:
            if character not in _TRIED:
                return True  # sets of characters are known for these only
            states = self._closed(
                {target for state in states for characters, target in self._by_set[state] if character in characters}
            )
            if not states:
                return False
        return self._last in states

    def _following(self, states: frozenset[int]) -> dict[str, frozenset[int]]:
        """One character for each set of states that may follow."""
        edges = [edge for state in states for edge in self._by_set[state]]
        found: dict[frozenset[int], str] = {}
        for character in dict.fromkeys(_TRIED):
            targets = {target for characters, target in edges if character in characters}
            if targets:
                found.setdefault(self._closed(targets), character)
        return {character: after for after, character in found.items()}

    def _closed(self, states: Iterable[int]) -> frozenset[int]:
        waiting, closed = list(states), set(states)
        while waiting:
            for state in self._empty[waiting.pop()]:
                if state not in closed:
                    closed.add(state)
                    waiting.append(state)
        return frozenset(closed)

    # ── from the parsed pattern ──

    def _state(self) -> int:
        if len(self._empty) >= 8 * _MAX_STATES:
            raise _TooLarge
        self._empty.append([])
        self._by_set.append([])
        return len(self._empty) - 1

    def _sequence(self, items: Iterable[Node], start: int, end: int) -> None:
        for item in items:
            after = self._state()
            self._item(item, start, after)
            start = after
        self._empty[start].append(end)

    def _item(self, item: Node, start: int, end: int) -> None:
        name, value = str(item[0]), item[1]
        match name:
            case "LITERAL":
                self._by_set[start].append((frozenset(chr(value)), end))
            case "NOT_LITERAL":
                self._by_set[start].append((frozenset(_TRIED) - {chr(value)}, end))
            case "ANY":
                self._by_set[start].append((frozenset(_TRIED), end))
            case "IN":
                self._by_set[start].append((_characters(value), end))
            case "BRANCH":
                for branch in value[1]:
                    self._sequence(branch, start, end)
            case "SUBPATTERN":
                self._sequence(value[3], start, end)
            case "ATOMIC_GROUP":
                self._sequence(value, start, end)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                self._repeat(value[0], value[1], value[2], start, end)
            case "AT":
                self._empty[start].append(end)
            case _:
                raise _TooLarge  # look-around, references: unlike any automaton

    def _repeat(self, least: int, most: int, part: Iterable[Node], start: int, end: int) -> None:
        part = list(part)
        for _ in range(int(least)):
            after = self._state()
            self._sequence(part, start, after)
            start = after
        if int(most) > 1000:
            loop = self._state()
            self._empty[start].append(loop)
            self._sequence(part, loop, loop)
            self._empty[loop].append(end)
            return
        for _ in range(int(most) - int(least)):
            self._empty[start].append(end)
            after = self._state()
            self._sequence(part, start, after)
            start = after
        self._empty[start].append(end)


def _is_anchor(items: list[Node], name: str) -> bool:
    return bool(items) and str(items[0][0]) == "AT" and str(items[0][1]).startswith(name)


def _characters(parts: Iterable[Node]) -> frozenset[str]:
    found: set[str] = set()
    is_negated = False
    for part in parts:
        match str(part[0]), part[1]:
            case "NEGATE", _:
                is_negated = True
            case "LITERAL", code:
                found.add(chr(code))
            case "RANGE", (low, high):
                found |= {character for character in _TRIED if low <= ord(character) <= high}
                found |= {chr(low)} if low > 126 else set()
            case "CATEGORY", category:
                expression = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[str(category).rpartition("_")[2]]
                is_not = "NOT" in str(category)
                found |= {one for one in _TRIED if bool(re.fullmatch(expression, one, re.ASCII)) is not is_not}
    return frozenset(_TRIED) - found if is_negated else frozenset(found)
