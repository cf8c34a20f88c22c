"""History: the engine's totals at every second of the last minutes, for a viewer that has just connected. A step that is not the
first of a second costs one comparison."""

from collections import deque

import msgspec

from octavo.observe.live_state import LivePast, LiveState, LiveTotals

EVERY_SECONDS = 1.0
NUM_KEPT = 300


class History:
    def __init__(self) -> None:
        self.due = 0.0  # when the next sample is
        self._kept: deque[LivePast] = deque(maxlen=NUM_KEPT)

    def note(self, now: float, totals: LiveTotals, num_used_pages: int, num_waiting: int) -> None:
        last = self._kept[-1] if self._kept else None
        if last is not None and now - last.time > 2 * EVERY_SECONDS and not last.num_waiting:
            # The engine was idle meanwhile: a rate must not be spread over that time.
            self._kept.append(msgspec.structs.replace(last, time=now - EVERY_SECONDS, num_used_pages=0))
        self._kept.append(_past(now, totals, num_used_pages, num_waiting))
        self.due = now + EVERY_SECONDS

    def all(self) -> list[LivePast]:
        """Oldest first."""
        return [*self._kept]

    def preemptions_since(self, then: float, total: int) -> int:
        """`total`: preemptions until now."""
        before = 0
        for past in reversed(self._kept):
            if past.time <= then:
                before = past.preemptions
                break
        return total - before


def past_of(state: LiveState) -> LivePast:
    used = state.num_pages - state.num_free_pages - state.num_cached_pages
    return _past(state.time, state.totals, used, state.num_waiting)


def _past(now: float, totals: LiveTotals, num_used_pages: int, num_waiting: int) -> LivePast:
    return LivePast(
        now,
        totals.generation_tokens,
        totals.first_tokens,
        totals.first_token_seconds,
        totals.token_gaps,
        totals.token_gap_seconds,
        totals.preemptions,
        num_used_pages,
        num_waiting,
    )
