"""The fewest tokens that spell a text, from each of its bytes on."""

from collections.abc import Iterable
from typing import NamedTuple

NEVER = 1 << 30
_LONG = 16  # bytes of the longest token that is looked for in a text


class Spelling(NamedTuple):
    """Of one text, by offset, with an entry for its end."""

    text: bytes
    num_tokens: list[int]  # from here to the end; NEVER: none spell it
    tokens: list[int]  # the first of them
    ends: list[int]  # where that one ends

    def rest(self, offset: int = 0, most: int = NEVER) -> list[int]:
        """At most so many of the tokens from an offset on. Empty: none spell the text, or it ends there."""
        found: list[int] = []
        if self.num_tokens[offset] >= NEVER:
            return found
        while offset < len(self.text) and len(found) < most:
            found.append(self.tokens[offset])
            offset = self.ends[offset]
        return found


class Speller:
    """`pieces`: tokens and their bytes. Of several tokens with the same bytes the first is used, one without white space before others."""

    def __init__(self, pieces: Iterable[tuple[int, bytes]]) -> None:
        self._tokens: dict[bytes, int] = {}
        lengths: dict[bytes, set[int]] = {}
        for token, piece in pieces:
            if len(piece) <= _LONG:
                self._tokens.setdefault(piece, token)
                lengths.setdefault(piece[:2], set()).add(len(piece))
        # First two bytes → lengths of the tokens that begin with them, the longest first.
        self._lengths = {start: tuple(sorted(found, reverse=True)) for start, found in lengths.items()}

    def spell(self, text: bytes, following: Spelling | None = None, offset: int = 0) -> Spelling:
        """Spell a text, and behind it what follows from an offset of another on, which is spelled already."""
        rest = b"" if following is None else following.text[offset:]
        whole = text + rest
        num_own = len(text)
        num_tokens = [NEVER] * num_own + ([0] if following is None else following.num_tokens[offset:])
        tokens = [-1] * num_own + ([-1] if following is None else following.tokens[offset:])
        ends = [0] * num_own + (
            [0] if following is None else [end - offset + num_own for end in following.ends[offset:]]
        )
        known, lengths, size = self._tokens, self._lengths, len(whole)
        for start in range(num_own - 1, -1, -1):
            best = NEVER
            for length in (*lengths.get(whole[start : start + 2], ()), 1):
                end = start + length
                if end <= size and num_tokens[end] < best - 1:
                    token = known.get(whole[start:end], -1)
                    if token >= 0:
                        best, tokens[start], ends[start] = num_tokens[end] + 1, token, end
            num_tokens[start] = best
        return Spelling(whole, num_tokens, tokens, ends)

    def fewest_tokens(self, text: bytes) -> list[int]:
        """Empty: none spell it."""
        return self.spell(text).rest()
