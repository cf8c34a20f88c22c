"""Shortest: a grammar's shortest whole answer, as far as that was found, and the way to an end that it shows from anywhere near it.
Knows nothing of how it was found, nor of rows: those with the same grammar share it, and change nothing in it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

LONGEST = 1024  # tokens up to which one is looked for
CONTEXT = 4  # tokens by which a place in it is known again
_AHEAD = 8  # tokens by which a place proves to be the right one
_MAX_PLACES = 64  # with the same tokens before them, as items of a list have


class ShortestCompletion:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        # Tokens left when an answer's end is first looked for: it may have said some more than it had to by then.
        self.looks_from = len(tokens) + len(tokens) // 4 + 32
        self._places: dict[tuple[int, ...], list[int]] = {}  # by the tokens before them, the last one first
        for place in range(len(tokens) - 1, CONTEXT - 1, -1):
            places = self._places.setdefault(tuple(tokens[place - CONTEXT : place]), [])
            if len(places) < _MAX_PLACES:
                places.append(place)

    def rest(self, matcher: "LLMatcher", after: tuple[int, ...], longest: int) -> list[int]:
        """What may follow `after` as it does here, all of it that `matcher` takes. The last such place comes first, so that a list
        ends rather than goes on."""
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
