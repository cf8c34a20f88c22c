"""Figures of a simulated run: what each request saw, what the fleet did, and percentiles of both."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from octavo.plan.step_model import PICOSECONDS

_PER_DECADE = 400  # buckets of a histogram: 0.6 % wide
PERCENTILES = (50, 90, 95, 99)


class Journey:
    """One request on its way. Times in picoseconds; −1: not yet."""

    __slots__ = (
        "arrived", "back", "came", "ended", "first", "is_refused", "last", "longest_gap", "num_moves", "num_sent", "number", "output_len",
        "prompt_len", "replica", "request_id", "tokens",
    )  # fmt: skip

    def __init__(
        self, number: int, arrived: int, prompt_len: int, output_len: int, back: tuple[int, int] = (0, 0)
    ) -> None:
        self.number, self.request_id = number, f"r{number}"
        self.arrived = arrived  # at the server
        self.came = arrived  # in the engine
        self.prompt_len, self.output_len = prompt_len, output_len
        self.first = self.last = self.ended = -1  # in the engine
        self.back = back  # of the first and of the last token: from there to the client
        self.longest_gap = 0
        self.replica = -1
        self.num_sent = 0  # output tokens that its client had when it was moved
        self.num_moves = 0  # to another replica, because its own ended
        self.is_refused = False
        self.tokens: list[int] = []  # prompt and output (content.py); empty once it has ended

    @property
    def ttft(self) -> float:
        return (self.first + self.back[0] - self.arrived) / PICOSECONDS

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first; 0 if there is only one."""
        seconds = max(0, self.received - self.first - self.back[0]) / PICOSECONDS
        return seconds / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def latency(self) -> float:
        return (self.received - self.arrived) / PICOSECONDS

    @property
    def received(self) -> int:
        """When its client has the last token."""
        return max(self.ended + self.back[1], self.first + self.back[0])


class Histogram:
    """Weighted times, in buckets of equal ratio."""

    def __init__(self) -> None:
        self._weights: Counter[int] = Counter()
        self.total = 0
        self._sum = 0

    def add(self, picoseconds: int, weight: int) -> None:
        self._weights[int(_PER_DECADE * math.log10(picoseconds)) if picoseconds > 0 else 0] += weight
        self.total += weight
        self._sum += picoseconds * weight

    def merge(self, other: "Histogram") -> None:
        self._weights.update(other._weights)
        self.total += other.total
        self._sum += other._sum

    def spread_by(self, noise: Sequence[float]) -> "Histogram":
        """The same times, each as often as another so many times as long. The mean stays."""
        if not noise:
            return self
        found = Histogram()
        shifts = Counter(round(_PER_DECADE * math.log10(max(each, 1e-3))) for each in noise)
        for bucket, weight in self._weights.items():
            for shift, count in shifts.items():
                found._weights[bucket + shift] += weight * count
        found.total, found._sum = self.total * len(noise), self._sum * len(noise)
        return found

    def shifted_by(self, jitter: Sequence[float]) -> "Histogram":
        """The same times, each as often as another so many seconds longer. The mean stays."""
        if not jitter:
            return self
        found = Histogram()
        buckets = np.array(list(self._weights), float)
        middles = 10 ** ((buckets + 0.5) / _PER_DECADE)
        shifted = np.maximum(middles[:, None] + np.array(jitter) * PICOSECONDS, 1.0)
        weights = np.repeat(np.array(list(self._weights.values()), float), len(jitter))
        counts = np.bincount((_PER_DECADE * np.log10(shifted)).astype(int).ravel(), weights)
        found._weights.update({int(bucket): round(float(counts[bucket])) for bucket in np.flatnonzero(counts)})
        found.total, found._sum = self.total * len(jitter), self._sum * len(jitter)
        return found

    def times(self, count: int) -> "Histogram":
        """Every time so often."""
        return self.spread_by([1.0] * count)

    def spread(self) -> "Spread | None":
        if not self.total:
            return None
        found: list[float] = []
        so_far, wanted = 0, [p / 100 * self.total for p in PERCENTILES]
        for bucket in sorted(self._weights):
            so_far += self._weights[bucket]
            while len(found) < len(wanted) and so_far >= wanted[len(found)]:
                found.append(10 ** ((bucket + 0.5) / _PER_DECADE) / PICOSECONDS)
        return Spread(self._sum / self.total / PICOSECONDS, *found)

    def share_within(self, seconds: float) -> float:
        most = int(_PER_DECADE * math.log10(max(1.0, seconds * PICOSECONDS)))
        return (
            sum(weight for bucket, weight in self._weights.items() if bucket <= most) / self.total
            if self.total
            else 1.0
        )


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def spread_of(values: Sequence[float]) -> Spread | None:
    """With linear interpolation between ranks, as `octavo bench` has it."""
    if not values:
        return None
    ordered = sorted(values)

    def at(percent: float) -> float:
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return Spread(sum(ordered) / len(ordered), *(at(percent) for percent in PERCENTILES))


class Levels(msgspec.Struct, frozen=True):
    """Service levels, in seconds: {("ttft", "p99"): 1.0}."""

    limits: dict[str, float]  # ttft_p99, itl_p99, tpot_mean, e2e_p95, …

    def missed(self, figures: "Figures") -> list[str]:
        """Names of the levels that these figures miss."""
        return [name for name, limit in self.limits.items() if figures.level(name) > limit]


class Figures(msgspec.Struct, frozen=True):
    """What a run comes to. Seconds."""

    num_replicas: int
    num_requests: int
    num_done: int
    num_refused: dict[str, int]  # by reason
    seconds: float  # from the first arrival to the last end
    rate: float  # requests that arrived, a second
    prompt_tokens: int
    output_tokens: int
    output_rate: float  # tokens a second
    total_rate: float  # prompt and output
    good_share: float  # of the requests: met every level by themselves
    goodput: float  # such requests a second
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    hit_rate: float  # prompt tokens found in a prefix cache
    preemptions: int
    waits: dict[str, float]  # seconds that heads of queues waited, by what for, over all replicas
    queue_seconds: Spread | None  # from arrival to a row
    most_waiting: int
    most_pages: float  # share of the KV store, of the fullest replica
    mean_rows: float  # rows of a step, of those that were computed
    busy_share: float  # of the replicas' time
    num_steps: int
    num_plans: int  # that were made one by one; the others were jumps
    drained_seconds: float  # from the last arrival to the last end
    moved: int  # requests that went on at another replica

    def level(self, name: str) -> float:
        """The value of a service level such as ttft_p99."""
        measure, _, which = name.rpartition("_")
        spread: Spread | None = getattr(self, measure)
        return math.inf if spread is None and self.num_requests else float(getattr(spread, which)) if spread else 0.0

    @property
    def refused_share(self) -> float:
        return sum(self.num_refused.values()) / self.num_requests if self.num_requests else 0.0


def is_good(journey: Journey, limits: Iterable[tuple[str, float]]) -> bool:
    """Whether a request by itself keeps every level. Of the times between its tokens, their mean and their longest are known."""
    for name, limit in limits:
        measure, _, which = name.rpartition("_")
        match measure:
            case "ttft":
                took = journey.ttft
            case "e2e":
                took = journey.latency
            case "itl" if which != "mean":
                took = (
                    journey.longest_gap / PICOSECONDS if which == "p99" and journey.output_len < 100 else journey.tpot
                )
            case _:
                took = journey.tpot
        if took > limit:
            return False
    return True
