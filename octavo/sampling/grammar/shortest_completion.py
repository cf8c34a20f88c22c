"""The shortest complete answer of a grammar, as far as one was found, used as a map to an end from any place near it. Rows
with the same grammar share it; it is never changed."""

from octavo.sampling.grammar.matcher import Matcher

LONGEST = 1024  # tokens of the longest completion to search for
CONTEXT = 4  # preceding tokens that identify a place in it
_AHEAD = 8  # following tokens that the matcher must accept to confirm a place
_MAX_PLACES = 64  # places kept per context; items of a list repeat theirs


class ShortestCompletion:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        # Tokens left at the first search for an answer's end. With a margin: the answer may be longer than necessary by then.
        self.looks_from = len(tokens) + len(tokens) // 4 + 32
        self._places: dict[tuple[int, ...], list[int]] = {}  # context → places, the last one first
        for place in range(len(tokens) - 1, CONTEXT - 1, -1):
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
