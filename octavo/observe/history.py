"""History: what the engine did in each second of the last minutes, each ten seconds of the last hours and each minute of the last day.

It lies in memory of a fixed size that the supervisor owns, so that the next engine continues it. A slot holds sums (tokens, seconds) and
maxima (pages, queue) of its interval, never totals since a start: a new engine adds to it, and a rate is never spread over a rest. An
interval in which nothing happened has no slot. A step that is not the first of a second costs one store and one comparison."""

import mmap
from typing import NamedTuple

import msgspec

from octavo.ipc.anonymous_memory import anonymous_memory
from octavo.observe.live_state import LiveHistory, LivePast, LiveTotals


class Level(NamedTuple):
    seconds: int  # of one slot
    num_slots: int

    @property
    def span(self) -> int:
        return self.seconds * self.num_slots


LEVELS = (Level(1, 600), Level(10, 720), Level(60, 1440))
MAX_SECONDS = LEVELS[-1].span
NUM_RECENT = 3
"""Intervals of the finest level that every look repeats: a watcher that misses a look still has them all."""
_SUMS = len(LiveTotals.__struct_fields__)
_FIELDS = len(LivePast.__struct_fields__)  # the start of the interval, then sums, `starts`, then maxima
_STARTS = 1 + _SUMS
_HEADER = 8  # words; the first: when the first engine was there
_NUM_WORDS = _HEADER + _FIELDS * sum(level.num_slots for level in LEVELS)
_SIZE = 8 * _NUM_WORDS
_NOTHING = (0.0,) * _SUMS


def history_memory() -> int:
    """Return a descriptor of fresh memory that engines can inherit. The caller closes it."""
    return anonymous_memory("octavo-history", _SIZE)


def history_bytes(fd: int) -> mmap.mmap:
    """All bytes of that memory, for a copy on another machine. The caller closes it."""
    return mmap.mmap(fd, _SIZE)


class History:
    """One engine writes; times are CLOCK_MONOTONIC seconds, so that those of two engines are comparable."""

    def __init__(self, fd: int = -1) -> None:
        """`fd`: from `history_memory()`. −1: private memory."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._words = memoryview(self._memory).cast("d")
        self.last_step = 0.0  # when a step ended last; the stepping thread sets it
        self.due = 0.0  # from then on the next note is due
        self._from = 0.0  # what is noted next began here
        self._before: tuple[float, ...] = _NOTHING  # totals that are noted already

    def start(self, now: float) -> None:
        """Mark the start of an engine. Its totals count from here."""
        if not self._words[0]:
            self._words[0] = now
        self._from = now
        for first, level in _places(now):
            self._open(first, now, level)
            self._words[first + _STARTS] += 1

    def resume(self, now: float) -> None:
        """Work arrives after a rest: what is noted next began now. What came before the rest is to be noted already."""
        self._from = now

    def note(self, totals: LiveTotals, used_share: float, num_waiting: int, num_rows: int) -> None:
        """Add what happened since the last note to the intervals in which it did. Nothing happens between `last_step` and now."""
        began, ended = self._from, max(self._from, self.last_step)
        after = tuple(map(float, msgspec.structs.astuple(totals)))
        added = tuple(new - old for new, old in zip(after, self._before, strict=True))
        self._before, self._from, self.due = after, ended, ended + 1.0
        if not any(added) and not num_rows and not num_waiting:
            return
        maxima = (used_share, float(num_waiting), float(num_rows))
        for level_first, level in _levels():
            self._spread(level_first, level, began, ended, added, maxima)

    def _spread(
        self, first: int, level: Level, began: float, ended: float, added: tuple[float, ...], maxima: tuple[float, ...]
    ) -> None:
        """Add to each interval its share of the time. A long step counts where it was computed, not where it ended."""
        words, width = self._words, level.seconds
        earliest = max(int(began // width), int(ended // width) - level.num_slots + 1)
        for number in range(earliest, int(ended // width) + 1):
            overlap = min(ended, (number + 1) * width) - max(began, number * width)
            share = overlap / (ended - began) if ended > began else 1.0
            slot = first + number % level.num_slots * _FIELDS
            self._open(slot, number * width, level)
            if share > 0:
                for at, value in enumerate(added, slot + 1):
                    words[at] += value * share
            for at, value in enumerate(maxima, slot + _STARTS + 1):
                words[at] = max(words[at], value)

    def _open(self, slot: int, now: float, level: Level) -> None:
        """Empty the slot if an earlier interval left it. A slot's first word is its start plus one: 0 marks one that was never used."""
        mark = now // level.seconds * level.seconds + 1
        if self._words[slot] != mark:
            self._words[slot : slot + _FIELDS] = memoryview(bytes(8 * _FIELDS)).cast("d")
            self._words[slot] = mark

    def recent(self, now: float) -> list[LivePast]:
        """The last intervals of the finest level, oldest first."""
        return self._read(0, now - NUM_RECENT * LEVELS[0].seconds)

    def read(self, seconds: float, now: float) -> LiveHistory:
        """The last `seconds`, in the finest intervals that reach so far back."""
        chosen = next((at for at, level in enumerate(LEVELS) if level.span >= seconds), len(LEVELS) - 1)
        return LiveHistory(now, LEVELS[chosen].seconds, self._words[0], self._read(chosen, now - seconds))

    def preemptions_since(self, then: float) -> int:
        return round(sum(past.preemptions for past in self._read(0, then)))

    def _read(self, chosen: int, then: float) -> list[LivePast]:
        first, level = list(_levels())[chosen]
        words, found = self._words, []
        for slot in range(first, first + level.num_slots * _FIELDS, _FIELDS):
            if words[slot] and words[slot] - 1 + level.seconds > then:
                values = words[slot + 1 : slot + _FIELDS].tolist()
                found.append(LivePast(words[slot] - 1, *(round(value, 4) for value in values)))
        return sorted(found, key=lambda past: past.time)


def _levels() -> list[tuple[int, Level]]:
    """Each level with the word at which its slots begin."""
    found, first = [], _HEADER
    for level in LEVELS:
        found.append((first, level))
        first += level.num_slots * _FIELDS
    return found


def _places(now: float) -> list[tuple[int, Level]]:
    """The slot of this moment on each level."""
    return [(first + int(now // level.seconds) % level.num_slots * _FIELDS, level) for first, level in _levels()]
