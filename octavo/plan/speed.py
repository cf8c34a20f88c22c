"""Speed: how fast a machine is at one time, beside what a StepModel says of it. The same requests are sent one at a time (a probe) and simulated. A
shared machine is not the same some minutes after it was measured; what rows take, and what prompts add, change apart from each other: rows read
weights, prompts compute."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from octavo.plan.fleet import Simulation
from octavo.plan.settings import FleetSettings
from octavo.plan.trace import Trace, TraceRequest

_APART = 1000.0  # seconds between two simulated requests: each is alone
_LEAST = 0.1  # speeds below it are not believed
_LEAST_SHARE = 0.05  # of first tokens' time: where prompts take less, nothing can be said of them alone


class Probed(NamedTuple):
    """A request that was alone, as its client saw it."""

    prompt_len: int
    output_len: int
    first: float  # seconds to its first token
    rest: float  # … from there to the last one


class Speed(msgspec.Struct, frozen=True):
    """How many times as long as a model says steps take."""

    prompts: float = 1.0  # what prompts add to them
    rows: float = 1.0  # all other parts

    def beside(self, other: "Speed") -> "Speed":
        """As a share of another one."""
        return Speed(self.prompts / other.prompts, self.rows / other.rows)

    def applied_to(self, settings: FleetSettings) -> FleetSettings:
        return msgspec.structs.replace(settings, model=settings.model.at_speed(self.prompts, self.rows))


def speed_of(settings: FleetSettings, probed: Sequence[Probed]) -> Speed:
    """The times after first tokens say how fast rows are; what first tokens then took longer, or less, is the prompts'. Of requests of one size,
    the middle ones count: what holds up a few is in the steps' mean already."""
    by_size: dict[tuple[int, int], list[Probed]] = {}
    for each in probed:
        by_size.setdefault((each.prompt_len, each.output_len), []).append(each)
    trace = Trace("probe", [TraceRequest(_APART * at, *size) for at, size in enumerate(by_size)])
    plain, slow_rows, slow_prompts = (
        _times(trace, each.applied_to(settings)) for each in (Speed(), Speed(rows=2.0), Speed(prompts=2.0))
    )
    # Both sums have a constant part, and one for each speed. What follows a first token has no part for prompts.
    first = sum(median(each.first for each in alike) for alike in by_size.values())
    rest = sum(median(each.rest for each in alike) for alike in by_size.values())
    rows = max(_LEAST, 1 + (rest - plain.rest) / (slow_rows.rest - plain.rest))
    by_prompts = slow_prompts.first - plain.first
    if by_prompts < _LEAST_SHARE * plain.first:
        return Speed(rows, rows)
    first -= (rows - 1) * (slow_rows.first - plain.first)
    return Speed(max(_LEAST, 1 + (first - plain.first) / by_prompts), rows)


class _Times(NamedTuple):
    first: float
    rest: float


def _times(trace: Trace, settings: FleetSettings) -> _Times:
    plain = msgspec.structs.replace(settings, model=msgspec.structs.replace(settings.model, noise=[]))
    journeys = Simulation(trace, plain).run().journeys
    first = sum(journey.ttft for journey in journeys)
    return _Times(first, sum(journey.latency for journey in journeys) - first)
