"""Stop strings in a growing text: which text may be released, and which stop string ended it.

The match that is complete first wins; of several that are complete at the same character, the longest. So the result does
not depend on how the text was cut into pieces. A suffix that may still become a stop string is held back until it does or
can no longer: at most one character less than the longest stop string.
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Released(msgspec.Struct, frozen=True, gc=False):
    text: str  # text that is outside every stop string
    stop: str | None = None  # the stop string that was found; nothing may be fed after it


class _Pattern:
    """Knuth-Morris-Pratt matcher. A state is the number of leading characters of `text` that the input so far ends with."""

    __slots__ = ("_fallback", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # _fallback[n]: length of the longest proper suffix of text[:n] that is also its prefix
        self._fallback = [0, 0]
        for character in text[1:]:
            length = self._fallback[-1]
            while length and text[length] != character:
                length = self._fallback[length]
            self._fallback.append(length + (text[length] == character))

    def next(self, state: int, character: str) -> int:
        """The state after one more character. len(text): it completes the pattern."""
        if state == len(self.text):
            state = self._fallback[state]
        while state and self.text[state] != character:
            state = self._fallback[state]
        return state + (self.text[state] == character)

    def held_len(self, state: int) -> int:
        """Number of characters at the end of the input that may still become part of a match."""
        return self._fallback[state] if state == len(self.text) else state


class _Compiled(NamedTuple):
    patterns: tuple[_Pattern, ...]
    starts: re.Pattern[str]  # the first character of any of them


@functools.lru_cache(maxsize=32)
def _compiled(stops: tuple[str, ...]) -> _Compiled:
    """Shared by all choices of all prompts of a request: the tables of long stop strings are large. Longest first: the first
    pattern found complete is then the longest of those complete at a character."""
    texts = sorted(set(stops), key=len, reverse=True)
    starts = "".join(re.escape(text[0]) for text in texts)
    return _Compiled(tuple(map(_Pattern, texts)), re.compile(f"[{starts}]" if starts else "(?!)"))


class StopStrings:
    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns, self._starts = _compiled(tuple(stops))
        self._states = [0] * len(self._patterns)
        self._held = ""

    def feed(self, text: str, counts: bool = True) -> Released:
        """Add text and return what may be released. `counts` False: a match that is completed within this text is ignored
        (min_tokens); one that only begins in it is not."""
        if not self._patterns:
            return Released(text)
        text, at = self._held + text, len(self._held)
        states = self._states
        while at < len(text):
            if not any(states):  # nothing has begun: on to where something may
                start = self._starts.search(text, at)
                if start is None:
                    break
                at = start.start()
            found = None
            for number, pattern in enumerate(self._patterns):  # feed every pattern: their states must stay in step
                states[number] = state = pattern.next(states[number], text[at])
                if state == len(pattern.text) and found is None:
                    found = pattern.text
            at += 1
            if found is not None and counts:
                self._held = ""
                return Released(text[: at - len(found)], found)
        cut = len(text) - max(map(_Pattern.held_len, self._patterns, states))
        self._held = text[cut:]
        return Released(text[:cut])

    def flush(self) -> str:
        """Return the held-back text at the end of the output: it can no longer become a stop string."""
        held, self._held = self._held, ""
        return held
