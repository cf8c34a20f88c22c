"""What a recording says: measured steps, for a StepModel; and its requests as a trace without text."""

import math
from collections.abc import Callable
from itertools import takewhile
from statistics import median
from typing import NamedTuple

from octavo.cache.page_keys import keys_of
from octavo.plan.trace import Trace, TraceRequest
from octavo.recording.format import Aborted, Arrived, Recording
from octavo.replay.replay import ReplayedCommit
from octavo.replay.what_if import Learned, learn
from octavo.schedule.step_costs import Sample, shape_of


class Passage(NamedTuple):
    """A request's way through the engine, in seconds of the clock that all processes of a machine share (CLOCK_MONOTONIC)."""

    arrived: float
    first: float  # its first token was known; infinite: it has none
    ended: float  # … its last one


class Measured:
    """Steps of a recording. A step's time is that from the result before it to its own, if a request was open all the while: so it has what
    planning, sending and other processes took, too."""

    def __init__(self, recording: Recording) -> None:
        # (when it ended, its computing alone, seconds since the one before)
        self._steps: list[tuple[int, Sample, float | None]] = []
        self._before = 0
        self._names: dict[str, str] = {}  # of open requests: the id of the response that each is
        self._open: set[str] = set()
        self._was_busy = False  # after the last step, some request was open
        self.passages: dict[str, Passage] = {}  # by the id of the response
        self.learned: Learned = learn(recording, self._hear)
        self._wall = recording.header.wall - recording.header.clock
        hosts = [between - sample.seconds for _, sample, between in self._steps if between is not None]
        self.host_seconds = max(0.0, median(hosts)) if hosts else 0.0

    def _hear(self, happening: object) -> None:
        match happening:
            case Arrived():
                self._open.add(happening.id)
                name = self._names[happening.id] = happening.response_id or happening.id
                self.passages[name] = Passage(happening.micros / 1e6, math.inf, math.inf)
            case Aborted():
                self._open.discard(happening.id)
            case ReplayedCommit():
                self._committed(happening)

    def _committed(self, happening: ReplayedCommit) -> None:
        for delta in happening.deltas:
            passage = self.passages.get(name := self._names.get(delta.request_id, ""))
            if passage is not None:
                now = happening.micros / 1e6
                self.passages[name] = Passage(passage.arrived, min(passage.first, now), now)
            if delta.finish is not None:
                self._open.discard(delta.request_id)
        seconds, between = happening.outcome.micros / 1e6, (happening.micros - self._before) / 1e6
        is_next, self._was_busy, self._before = self._was_busy, bool(self._open), happening.micros
        if seconds and not happening.plan.moves:
            sample = Sample(shape_of(happening.plan, happening.outcome.num_tokens), seconds)
            self._steps.append((happening.micros, sample, between if is_next and between >= seconds else None))

    def timed(self, since: float = -math.inf, until: float = math.inf) -> list[tuple[float, Sample]]:
        """Steps that ended between these times, with the times at which they did: seconds since 1970."""
        return [
            (ended, Sample(sample.shape, sample.seconds + self.host_seconds if between is None else between))
            for micros, sample, between in self._steps
            if since <= (ended := micros / 1e6 + self._wall) <= until
        ]

    def samples(self, since: float = -math.inf, until: float = math.inf) -> list[Sample]:
        return [sample for _, sample in self.timed(since, until)]

    def arrivals(self, since: float, until: float) -> list[float]:
        """When requests came between these times."""
        times = (request.seconds + self._wall for request in self.learned.requests)
        return [each for each in times if since <= each <= until]


def trace_of(recording: Recording, rename: Callable[[bytes], int], learned: Learned | None = None) -> Trace:
    """Times, lengths and shared pages of the recorded requests. Of contents, only which pages are equal is left: `rename` numbers
    their keys. Requests without an end are as long as they had become; such as ask for vectors are left out. `learned`: of this recording, where
    it is known already."""
    learned, header = learn(recording) if learned is None else learned, recording.header
    page_size = header.report.page_size
    requests = []
    for each in learned.requests:
        source = each.source
        if source.pooling is not None or source.params.use_beam_search:
            continue
        prompt_len = len(source.prompt_ids)
        if header.with_tokens:
            keys = keys_of(header.root, source.prompt_ids, page_size)
        else:
            named = ((source.prompt_ids[0], page) for page in range((prompt_len - 1) // page_size))
            keys = list(takewhile(bool, (learned.keys.get(name, b"") for name in named)))
        blocks = [rename(key) for key in keys]
        for output in each.outputs.values() or [[0]]:
            requests.append(TraceRequest(each.seconds, prompt_len, max(1, len(output)), blocks))
    requests.sort(key=lambda request: request.seconds)
    start = requests[0].seconds if requests else 0.0
    moved = [TraceRequest(each.seconds - start, each.prompt_len, each.output_len, each.prefix) for each in requests]
    return Trace("recording", moved, page_size)
