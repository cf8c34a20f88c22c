"""Repetition detection: whether an answer ends with the same few tokens over and over."""

from collections import deque
from collections.abc import Iterable

from octavo.messages import RepetitionDetectionParams


class Loops:
    """Takes every token of one answer. A pattern of p tokens has occurred `min_count` times when each of the last p × (min_count − 1)
    tokens equals the one p before it. So it is enough to count, for each distance at which a token recurred, how many tokens in a
    row did. The cost of a token is the number of its occurrences within the largest pattern."""

    __slots__ = ("_before", "_last", "_least", "_most", "_num_seen", "_places", "_times")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._least, self._most = max(1, params.min_pattern_size), params.max_pattern_size
        self._times = params.min_count - 1
        self._num_seen = 0
        self._last: deque[int] = deque()  # tokens within reach, oldest first
        self._places: dict[int, deque[int]] = {}  # token → its positions within reach
        self._before: dict[int, int] = {}  # distance → how many tokens in a row equalled the one at that distance

    def add(self, token: int) -> bool:
        """True: a pattern has occurred often enough."""
        at = self._num_seen
        self._num_seen += 1
        places = self._places.setdefault(token, deque())
        before, is_loop = self._before, False
        now: dict[int, int] = {}
        for place in places:
            distance = at - place
            now[distance] = length = before.get(distance, 0) + 1
            is_loop = is_loop or (distance >= self._least and length >= distance * self._times)
        self._before = now
        places.append(at)
        self._last.append(token)
        if len(self._last) > self._most:
            gone = self._last.popleft()
            self._places[gone].popleft()
            if not self._places[gone]:
                del self._places[gone]
        return is_loop


def loops_of(params: RepetitionDetectionParams | None, begun: Iterable[int]) -> Loops | None:
    """`begun`: the answer so far. None: detection is off."""
    if params is None or not params.max_pattern_size:
        return None
    loops = Loops(params)
    for token in begun:
        loops.add(token)
    return loops
