"""Measures what journeys cost the host: steps of a steady decode with and without the journal, alternating in one run.
The modules are the real ones; the executor is host_step's.

Usage: python -m benchmarks.journeys [--rows 256] [--steps 600] [--rounds 6]

The two sides alternate step by step, so that noise affects both. The verdict uses the time spent inside the journal's own
calls, which is exact to a clock's tick. The difference of the two sides is printed beside it; it is only as exact as the
machine is quiet."""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.host_step import WARMUP, build, fill
from octavo.cli.bench.report import facts
from octavo.engine.loop import EngineLoop
from octavo.observe.journeys.journal import EngineJournal
from octavo.observe.step_observer import StepTimes
from octavo.schedule.results import Committed, Planned

MAX_SHARE = 0.01


class TimedJournal(EngineJournal):
    """Measures what its events take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.seconds, self._clock = 0.0, clock

    def planned(self, planned: Planned, now: float) -> None:
        started = self._clock()
        super().planned(planned, now)
        self.seconds += self._clock() - started

    def committed(self, committed: Committed, times: StepTimes) -> None:
        started = self._clock()
        super().committed(committed, times)
        self.seconds += self._clock() - started


def make(rows: int, steps: int, journal: EngineJournal | None, clock: Callable[[], float]) -> EngineLoop:
    """A loop with this journal in place of its own. None: without one."""
    loop, _ = build(rows, steps, False, clock, (0,))
    (own,) = [observer for observer in loop.observers if isinstance(observer, EngineJournal)]
    loop.observers.remove(own)
    if journal is not None:
        loop.observers.add(journal)
    fill(loop, rows, 0, steps + 8, lockstep=False)
    return loop


def one_round(
    rows: int, steps: int, is_odd: bool, clock: Callable[[], float]
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the seconds of each step: with journeys, without, and inside the journal (of a third loop, so that its clock costs neither)."""
    total = steps + WARMUP
    # The loop that is made first lies elsewhere in memory: which one that is changes from round to round.
    made = {
        has_journal: make(rows, total, EngineJournal() if has_journal else None, clock)
        for has_journal in (is_odd, not is_odd)
    }
    with_journal, without = made[True], made[False]
    timed = TimedJournal(clock)
    inside = make(rows, total, timed, clock)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    kept: tuple[list[float], list[float], list[float]] = ([], [], [])
    for step in range(total):
        # The order alternates: the second loop finds the caches as the first left them.
        pairs = [(with_journal, kept[0]), (without, kept[1])]
        for loop, seconds in pairs if step % 2 else reversed(pairs):
            started = clock()
            loop.step()
            if step >= WARMUP:
                seconds.append(clock() - started)
        timed.seconds = 0.0
        inside.step()
        if step >= WARMUP:
            kept[2].append(timed.seconds)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    clock = time.thread_time
    empty = statistics.median(-(clock() - clock()) for _ in range(10_000))  # what reading the clock adds to each call
    machine = facts()["machine"]
    print(
        f"{machine['processor']}, {machine['cores']} cores; {arguments.rows} rows, CPU microseconds of a step, medians"
    )
    print(f"{'round':>5} {'with':>9} {'without':>9} {'difference':>11} {'inside':>9} {'share':>8}")
    shares, differences = [], []
    for number in range(1, arguments.rounds + 1):
        kept = one_round(arguments.rows, arguments.steps, bool(number % 2), clock)
        on, off, inside = (statistics.median(seconds) for seconds in kept)
        inside = max(0.0, inside - 2 * empty)  # two calls in a steady step
        shares.append(inside / off)
        differences.append(statistics.median(a - b for a, b in zip(kept[0], kept[1], strict=True)) / off)
        print(
            f"{number:5} {on * 1e6:9.1f} {off * 1e6:9.1f} {differences[-1]:11.2%} {inside * 1e6:9.2f} {shares[-1]:8.2%}"
        )
    share, difference = statistics.median(shares), statistics.median(differences)
    is_cheap = share < MAX_SHARE
    print(f"journeys take {share:.2%} of a step's host time (difference of the sides: {difference:+.2%}): "
          f"{'under' if is_cheap else 'NOT under'} {MAX_SHARE:.0%}")  # fmt: skip
    return 0 if is_cheap else 1


if __name__ == "__main__":
    sys.exit(main())
