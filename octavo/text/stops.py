"""Stop strings in a growing text: what may be shown, and which stop string ended it.
Knows nothing of tokens: it is fed text and told whether a match may count yet.

The match that is complete first wins; of several complete at the same character, the longest. So the answer does not
depend on how the text was cut into pieces. A suffix that may still become a stop string is held back until it does or
cannot any more: at most one character less than the longest stop string.
"""

from collections.abc import Sequence

import msgspec


class Released(msgspec.Struct, frozen=True, gc=False):
    text: str  # certain to be outside every stop string
    stop: str | None = None  # the stop string that was found; nothing may be fed after it


class _Pattern:
    """Knuth-Morris-Pratt: `state` is how many characters of `text` the input so far ends with."""

    __slots__ = ("_fallback", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        # _fallback[n]: the longest proper suffix of text[:n] that is also its prefix
        self._fallback = [0, 0]
        for character in text[1:]:
            length = self._fallback[-1]
            while length and text[length] != character:
                length = self._fallback[length]
            self._fallback.append(length + (text[length] == character))

    def feed(self, character: str) -> bool:
        """True where this character completes the pattern."""
        state = self.state
        if state == len(self.text):
            state = self._fallback[state]
        while state and self.text[state] != character:
            state = self._fallback[state]
        self.state = state + (self.text[state] == character)
        return self.state == len(self.text)

    @property
    def held_len(self) -> int:
        """Characters at the end of the input that a later match could still claim."""
        return self._fallback[self.state] if self.state == len(self.text) else self.state


class StopStrings:
    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first: the first pattern found complete is then the longest of those complete at a character.
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str, counts: bool = True) -> Released:
        """`counts` False: a match completed within this text is passed over (min_tokens); one begun in it is not."""
        if not self._patterns:
            return Released(text)
        text, already = self._held + text, len(self._held)
        for at in range(already, len(text)):
            found = None
            for pattern in self._patterns:  # every one is fed: their states must stay in step
                if pattern.feed(text[at]) and found is None:
                    found = pattern.text
            if found is not None and counts:
                self._held = ""
                return Released(text[: at + 1 - len(found)], found)
        cut = len(text) - max(pattern.held_len for pattern in self._patterns)
        self._held = text[cut:]
        return Released(text[:cut])

    def flush(self) -> str:
        """The text is over: what was held back cannot become a stop string any more."""
        held, self._held = self._held, ""
        return held
