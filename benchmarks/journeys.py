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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.host_step import WARMUP, build, fill
from octavo.cli.bench.report import facts
from octavo.engine.loop import EngineLoop
from octavo.messages import StepPlan
from octavo.observe.journeys.journal import EngineJournal

MAX_SHARE = 0.01
VERBS = ("queued", "returned", "admitted", "forked", "planned", "committed", "ended")


class NoJournal(EngineJournal):
    """A journal that keeps nothing."""

    def queued(self, *about: Any) -> None: ...
    def returned(self, *about: Any) -> None: ...
    def admitted(self, *about: Any) -> None: ...
    def forked(self, requests: Iterable[Any]) -> None: ...
    def planned(self, plan: StepPlan, head: Any, reason: Any, now: float) -> None: ...
    def committed(self, step: int, num_rows: int, num_tokens: int, now: float) -> None: ...
    def ended(self, *about: Any) -> None: ...


class Timed:
    """Times a journal's methods."""

    def __init__(self, journal: EngineJournal, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        for verb in VERBS:
            setattr(journal, verb, self._timed(getattr(journal, verb), clock))

    def _timed(self, call: Callable[..., None], clock: Callable[[], float]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            started = clock()
            call(*arguments)
            self.seconds += clock() - started

        return timed


def make(rows: int, steps: int, journal: EngineJournal, clock: Callable[[], float]) -> EngineLoop:
    loop, _ = build(rows, steps, False, clock, (0,))
    loop.journal = journal
    fill(loop, rows, 0, steps + 8, lockstep=False)
    return loop


def one_round(
    rows: int, steps: int, is_odd: bool, clock: Callable[[], float]
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the seconds of each step: with journeys, without, and inside the journal (of a third loop, so that its clock costs neither)."""
    total = steps + WARMUP
    timed_journal = EngineJournal()
    # The first loop made lies elsewhere in memory, so the order alternates from round to round.
    made = {
        kind: make(rows, total, kind(), clock)
        for kind in ((EngineJournal, NoJournal) if is_odd else (NoJournal, EngineJournal))
    }
    with_journal, without = made[EngineJournal], made[NoJournal]
    inside = make(rows, total, timed_journal, clock)
    timer = Timed(timed_journal, clock)
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
        timer.seconds = 0.0
        inside.step()
        if step >= WARMUP:
            kept[2].append(timer.seconds)
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
