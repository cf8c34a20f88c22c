"""Reads the recording of a server: how long its steps with prompts took beside what was predicted, and which steps lie in a client's
longest waits for a token. benchmarks.stalls --steps prints it for its own servers.

    octavo serve … --record-folder FOLDER &          # load, then
    python -m benchmarks.stalls_steps FOLDER/live-…"""

import argparse
import math
import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.recording.format import read
from octavo.replay.replay import Replay, ReplayedCommit, ReplayedPlan
from octavo.schedule.step_costs import StepShape, shape_of

_STARTS = (
    0,
    512,
    1024,
    2048,
    3072,
    4096,
)  # how many tokens lie before a part of a prompt: lower ends of the rows of a table
_COUNTS = (2, 32, 64, 128, 256)  # tokens of that part: lower ends


@dataclass(frozen=True)
class Step:
    at: float  # when it was committed, seconds of the monotonic clock
    seconds: float
    predicted: float  # nan: costs were not known when it was planned
    limit: float  # inf: it had none
    shape: StepShape
    start: int  # tokens before the longest part of a prompt in it
    count: int  # tokens of that part; 0: it computes no prompts
    num_prompts: int
    num_drafted: int


def steps_of(folder: Path) -> list[Step]:
    """Every step in a recording, by replaying it."""
    replay, found = Replay(read(folder)), []
    foreseen: dict[int, tuple[float, float]] = {}
    for happening in replay.follow():
        if isinstance(happening, ReplayedPlan) and not happening.plan.is_empty:
            plan, costs, limit = happening.plan, replay.scheduler.costs, replay.scheduler.stall_limit
            predicted, longest = math.nan, math.inf
            if costs is not None:
                predicted = costs.seconds(shape_of(plan, sum(plan.counts)))
                ones = [start for start, count in zip(plan.starts, plan.counts, strict=True) if count == 1]
                if ones and limit is not None:
                    longest = limit.within(costs, costs.seconds(StepShape(len(ones), 0, sum(ones), 0)))
            foreseen[plan.step] = predicted, longest
        elif isinstance(happening, ReplayedCommit):
            plan = happening.plan
            predicted, longest = foreseen.pop(plan.step)
            drafted = {draft.at for draft in plan.drafts}
            parts = [
                (count, start)
                for at, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True))
                if count > 1 and at not in drafted
            ]
            count, start = max(parts, default=(0, 0))
            shape = shape_of(plan, happening.outcome.num_tokens, happening.outcome.drafted)
            seconds = happening.outcome.micros / 1e6
            num_drafted = shape.rows - len(plan.rows)
            found.append(
                Step(happening.micros / 1e6, seconds, predicted, longest, shape, start, count, len(parts), num_drafted)
            )
    return found


def during(steps: Iterable[Step], windows: Sequence[tuple[float, float]]) -> list[Step]:
    return [step for step in steps if any(start <= step.at <= end for start, end in windows)]


def show(steps: Sequence[Step], gaps: Sequence[tuple[float, float]] = ()) -> None:
    """`gaps`: (when, seconds) of waits for a token, at a client on this machine."""
    _show_kinds(steps)
    _show_starts(steps)
    if gaps:
        _show_gaps(steps, gaps)


def _show_kinds(steps: Sequence[Step]) -> None:
    kinds = {
        "without prompts": [step for step in steps if not step.count and not step.num_drafted],
        "with drafts": [step for step in steps if not step.count and step.num_drafted],
        "one prompt": [step for step in steps if step.num_prompts == 1],
        "several prompts": [step for step in steps if step.num_prompts > 1],
    }
    print(f"{'steps, ms':28}{'steps':>8}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}{'foreseen p50':>14}{'p99':>8}{'took / foreseen p10':>21}{'p50':>8}{'p90':>8}{'p99':>8}{'limit p50':>11}")  # fmt: skip
    for name, kind in kinds.items():
        if kind:
            print(_line(name, kind))


def _show_starts(steps: Sequence[Step]) -> None:
    for low, high in zip(_STARTS, (*_STARTS[1:], 1 << 30), strict=True):
        for fewest, most in zip(_COUNTS, (*_COUNTS[1:], 1 << 30), strict=True):
            kind = [step for step in steps if low <= step.start < high and fewest <= step.count < most]
            if kind:
                print(_line(f"  from {low:,}, {fewest} to {min(most - 1, 9999):,} tokens", kind))


def _line(name: str, steps: Sequence[Step]) -> str:
    took = sorted(step.seconds for step in steps)
    known = [step for step in steps if not math.isnan(step.predicted)]
    foreseen = sorted(step.predicted for step in known)
    ratios = sorted(step.seconds / step.predicted for step in known if step.predicted > 0)
    limits = sorted(step.limit for step in steps if not math.isinf(step.limit))
    cells = "".join(f"{_at(took, share) * 1e3:8.1f}" for share in (0.5, 0.9, 0.99, 1))
    cells += f"{_at(foreseen, 0.5) * 1e3:14.1f}{_at(foreseen, 0.99) * 1e3:8.1f}"
    cells += f"{_at(ratios, 0.1):21.2f}" + "".join(f"{_at(ratios, share):8.2f}" for share in (0.5, 0.9, 0.99))
    return f"{name:28}{len(steps):8,}{cells}{_at(limits, 0.5) * 1e3:11.1f}"


def _show_gaps(steps: Sequence[Step], gaps: Sequence[tuple[float, float]]) -> None:
    """Whether a client's long waits are long steps, or tokens that came late after short ones."""
    ordered = sorted(steps, key=lambda step: step.at)
    times = [step.at for step in ordered]
    longest = sorted(gaps, key=lambda gap: -gap[1])[: max(20, len(gaps) // 50)]
    print(
        f"the {len(longest):,} longest of {len(gaps):,} waits for a token: ms, the longest between two steps' ends, and the step"
    )
    shares: list[float] = []
    lines: dict[float, str] = {}
    for at, seconds in longest:
        first = max(1, bisect_left(times, at - seconds) - 1)
        inside = range(first, min(len(times), bisect_left(times, at) + 1))
        if not inside:
            continue
        worst = max(inside, key=lambda i: times[i] - times[i - 1])
        between = times[worst] - times[worst - 1]
        shares.append(between / seconds)
        step = ordered[worst]
        lines.setdefault(
            step.at,
            f"  {seconds * 1e3:7.1f} {between * 1e3:7.1f}   took {step.seconds * 1e3:6.1f}, foreseen {step.predicted * 1e3:6.1f}, limit {step.limit * 1e3:6.1f}: "
            f"{step.shape.rows} rows, {step.num_prompts} prompts, the longest {step.count} tokens after {step.start:,}; context {step.shape.context:,}",
        )
    for line in list(lines.values())[:40]:
        print(line)
    shares.sort()
    print(
        f"  a step's share of such a wait: p10 {_at(shares, 0.1):.2f}, p50 {_at(shares, 0.5):.2f}, p90 {_at(shares, 0.9):.2f}"
    )


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls_steps", description=__doc__)
    parser.add_argument("folder", type=Path, help="a recording: a file, or the folder that a running server writes to")
    show(steps_of(parser.parse_args().folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
