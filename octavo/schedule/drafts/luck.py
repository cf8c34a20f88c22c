"""Luck: how often a token that stood behind a match came again, by the length of the match."""

# Chances before anything is known, for matches of 0 (the beginning of a prediction), 1, 2, 4, 8, 16 tokens and more.
_PRIOR = (0.8, 0.2, 0.35, 0.6, 0.8, 0.9)
_PRIOR_WEIGHT = 4  # as if so many tokens had been seen
_MEMORY = 16  # tokens of one length, after which an old one counts for little

LuckState = tuple[list[float], list[int]]


class Luck:
    """A moving average for each class of lengths, of one request. It follows from the request's tokens alone."""

    __slots__ = ("_chances", "_counts")

    def __init__(self) -> None:
        self._chances = list(_PRIOR)
        self._counts = [_PRIOR_WEIGHT] * len(_PRIOR)

    def note(self, match: int, is_hit: bool) -> None:
        """The token behind a match of this length came, or another one."""
        at = _class_of(match)
        count = self._counts[at] = min(self._counts[at] + 1, _MEMORY)
        self._chances[at] += (is_hit - self._chances[at]) / count

    def chance(self, match: int) -> float:
        return self._chances[_class_of(match)]

    @property
    def state(self) -> LuckState:
        return self._chances[:], self._counts[:]

    @state.setter
    def state(self, state: LuckState) -> None:
        self._chances, self._counts = list(state[0]), list(state[1])


def _class_of(match: int) -> int:
    return min(match.bit_length(), len(_PRIOR) - 1)
