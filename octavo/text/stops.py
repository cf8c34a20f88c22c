"""Stop strings in a growing text: which text may be released, and which stop string ended it.

The match that is complete first wins; of several that are complete at the same character, the longest. So the result does
not depend on how the text was cut into pieces. A suffix that may still become a stop string is held back until it does or
can no longer: at most one character less than the longest stop string.
"""

from collections.abc import Sequence

import msgspec


class Released(msgspec.Struct, frozen=True, gc=False):
    text: str  # text that is outside every stop string
    stop: str | None = None  # the stop string that was found; nothing may be fed after it


class _Pattern:
    """Knuth-Morris-Pratt matcher: `state` is the number of leading characters of `text` that the input so far ends with."""

    __slots__ = ("_fallback", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        # _fallback[n]: length of the longest proper suffix of text[:n] that is also its prefix
        self._fallback = [0, 0]
        for character in text[1:]:
            length = self._fallback[-1]
            while length and text[length] != character:
                length = self._fallback[length]
            self._fallback.append(length + (text[length] == character))

    def feed(self, character: str) -> bool:
        """Return whether this character completes the pattern."""
        state = self.state
        if state == len(self.text):
            state = self._fallback[state]
        while state and self.text[state] != character:
            state = self._fallback[state]
        self.state = state + (self.text[state] == character)
        return self.state == len(self.text)

    @property
    def held_len(self) -> int:
        """Number of characters at the end of the input that may still become part of a match."""
        return self._fallback[self.state] if self.state == len(self.text) else self.state


class StopStrings:
    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first: the first pattern found complete is then the longest of those complete at a character.
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str, counts: bool = True) -> Released:
        """Add text and return what may be released. `counts` False: a match that is completed within this text is ignored
        (min_tokens); one that only begins in it is not."""
        if not self._patterns:
            return Released(text)
        text, already = self._held + text, len(self._held)
        for at in range(already, len(text)):
            found = None
            for pattern in self._patterns:  # feed every pattern: their states must stay in step
                if pattern.feed(text[at]) and found is None:
                    found = pattern.text
            if found is not None and counts:
                self._held = ""
                return Released(text[: at + 1 - len(found)], found)
        cut = len(text) - max(pattern.held_len for pattern in self._patterns)
        self._held = text[cut:]
        return Released(text[:cut])

    def flush(self) -> str:
        """Return the held-back text at the end of the output: it can no longer become a stop string."""
        held, self._held = self._held, ""
        return held
