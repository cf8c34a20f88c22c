"""The shortest complete answer of a grammar, as far as one was found, used as a map to an end from any place near it. Rows
with the same grammar share it; it is never changed."""

import bisect
import re

from octavo.sampling.grammar.known_end import LONGEST_FOLLOWED, KnownEnd
from octavo.sampling.grammar.matcher import Matcher
from octavo.sampling.grammar.spelling import Speller, Spelling

LONGEST = 1024  # tokens of the longest completion to search for
CONTEXT = 4  # preceding tokens that identify a place in it
_AHEAD = 8  # following tokens that the matcher must accept to confirm a place
_MAX_PLACES = 64  # places kept per context; items of a list repeat theirs
_WINDOW = 192  # places after values that are looked at after the first that fits
_STRING_OR_SIGN = re.compile(rb'"(?:[^"\\]|\\.)*"|[,\]}]', re.S)


class ShortestCompletion:
    def __init__(self, tokens: list[int], speller: Speller | None = None, text: bytes = b"") -> None:
        """`text`: of these tokens, if it is all JSON; else empty."""
        self._speller = speller
        self.spelling: Spelling | None = None
        if speller is not None and text:
            self.spelling = speller.spell(text)
            tokens = self.spelling.rest() or tokens
        self.tokens = tokens
        self.known = KnownEnd(tokens, self.spelling if len(text) <= LONGEST_FOLLOWED else None)
        # Tokens left at the first search for an answer's end. With a margin: the answer may be longer than necessary by then.
        self.looks_from = len(tokens) + len(tokens) // 4 + 32
        # Places in the text after which a comma or a bracket follows: there a value is complete.
        self._after_values = [found.start() for found in _STRING_OR_SIGN.finditer(text) if found[0][:1] != b'"']
        # Where there is no text: context → places, the last one first.
        self._places: dict[tuple[int, ...], list[int]] = {}
        for place in range(len(tokens) - 1, CONTEXT - 1, -1) if self.spelling is None else ():
            places = self._places.setdefault(tuple(tokens[place - CONTEXT : place]), [])
            if len(places) < _MAX_PLACES:
                places.append(place)

    def rest(self, matcher: Matcher, after: tuple[int, ...], longest: int) -> list[int]:
        """The tokens that follow `after` here, as far as `matcher` accepts them. The last such place is tried first, so that
        a list ends rather than continues."""
        best, most = 0, 0
        for place in self._places.get(after, ()):
            ahead = self.tokens[place : place + _AHEAD]
            num_taken = matcher.validate_tokens(ahead)
            if num_taken > most:
                best, most = place, num_taken
            if num_taken == len(ahead):
                break
        if not most:
            return []
        way = self.tokens[best : best + longest]
        return way[: matcher.validate_tokens(way)]

    def join(self, matcher: Matcher, start: int) -> int:
        """Where in the text, from `start` on, an answer stands whose last value is complete: from there on the text leads to its end. Of
        several places the last, so that a list ends rather than continues. −1: nowhere."""
        if self.spelling is None:
            return -1
        fitting: list[int] = []
        num_since = 0  # places looked at since the first that fits
        for place in self._after_values[bisect.bisect_left(self._after_values, start) :]:
            ahead = self.spelling.rest(place, _AHEAD)
            if ahead and matcher.validate_tokens(ahead) == len(ahead):
                fitting.append(place)
            num_since += bool(fitting)
            if num_since > _WINDOW:
                break
        for place in reversed(fitting):
            after = matcher.deep_copy()
            if after.consume_tokens(self.spelling.rest(place)) and after.is_accepting():
                return place
        return -1

    def way(self, begun: bytes, place: int) -> list[int]:
        """The fewest tokens of a text, and behind it of what follows a place here. Empty: none spell it."""
        assert self._speller is not None and self.spelling is not None
        return self._speller.spell(begun, self.spelling, place).rest()
