"""Whether an answer has run into a loop: it ends with the same few tokens over and over.
Knows nothing of requests or of what the tokens mean."""

from collections import deque
from collections.abc import Iterable

from octavo.messages import RepetitionDetectionParams


class Loops:
    """Sees every token of one answer. A pattern of p tokens has come `min_count` times when the last p × (min_count − 1) tokens
    are each the one p before: so it is enough to count, for each distance at which a token came again, how long it has done so.
    The cost of a token is the number of times that it came within the largest pattern."""

    __slots__ = ("_before", "_last", "_least", "_most", "_num_seen", "_places", "_times")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._least, self._most = max(1, params.min_pattern_size), params.max_pattern_size
        self._times = params.min_count - 1
        self._num_seen = 0
        self._last: deque[int] = deque()  # tokens within reach, oldest first
        self._places: dict[int, deque[int]] = {}  # token → where it came within reach
        self._before: dict[int, int] = {}  # distance → how many tokens in a row were the one so far before

    def add(self, token: int) -> bool:
        """True: a pattern has come often enough."""
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
    """`begun`: what an answer has so far. None: nothing is looked for."""
    if params is None or not params.max_pattern_size:
        return None
    loops = Loops(params)
    for token in begun:
        loops.add(token)
    return loops
