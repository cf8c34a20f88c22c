"""What a recording says: measured steps, for a StepModel; and its requests as a trace without text."""

import math
from array import array
from collections.abc import Callable
from itertools import takewhile
from statistics import median
from typing import NamedTuple

from octavo.cache.page_keys import keys_of
from octavo.plan.step_model import AFTER_FIRST, MeasuredStep
from octavo.plan.trace import Trace, TraceRequest
from octavo.recording.format import Aborted, Arrived, Recording
from octavo.replay.replay import Replay, ReplayedCommit
from octavo.replay.what_if import Learned, learn
from octavo.schedule.step_costs import shape_of

_LEAST_SHARE = 0.5 ** (AFTER_FIRST - 1)


class Passage(NamedTuple):
    """A request's way through the engine, in seconds of the clock that all processes of a machine share (CLOCK_MONOTONIC)."""

    arrived: float
    first: float  # its first token was known; infinite: it has none
    ended: float  # … its last one


class Measured:
    """Steps of a recording. A step's time is that from the result before it to its own, if a request was open all the while, and from the arrival
    of the first request if none was: so it has what planning, sending and other processes took, too."""

    def __init__(self, recording: Recording) -> None:
        # (when it ended, seconds of computing alone, …)
        self._steps: list[tuple[int, float, MeasuredStep]] = []
        self._before = 0
        self._woken: int | None = None  # when the first request came to an idle engine
        self._after_first = 0.0  # of the next step
        self._names: dict[str, str] = {}  # of open requests: the id of the response that each is
        self._open = set(Replay(recording).scheduler.request_ids())
        self.passages: dict[str, Passage] = {}  # by the id of the response
        # … when each of its tokens was known, of the same clock, and the step's number of rows; negative: with a prompt.
        self.token_times: dict[str, array[float]] = {}
        self.token_rows: dict[str, array[int]] = {}
        self.learned: Learned = learn(recording, self._hear)
        self._wall = recording.header.wall - recording.header.clock
        hosts = [
            step.seconds - computed for _, computed, step in self._steps if not step.wakes and step.seconds >= computed
        ]
        self.host_seconds = max(0.0, median(hosts)) if hosts else 0.0

    def _hear(self, happening: object) -> None:
        match happening:
            case Arrived():
                if not self._open:
                    self._woken = happening.micros
                self._open.add(happening.id)
                name = self._names[happening.id] = happening.response_id or happening.id
                self.passages[name] = Passage(happening.micros / 1e6, math.inf, math.inf)
                self.token_times[name], self.token_rows[name] = array("d"), array("i")
            case Aborted():
                self._open.discard(happening.id)
                if not self._open:
                    self._woken = None
            case ReplayedCommit():
                self._committed(happening)

    def _committed(self, happening: ReplayedCommit) -> None:
        gives_first = False
        rows = len(happening.plan.rows)
        rows = -rows if happening.outcome.num_tokens > rows else rows
        for delta in happening.deltas:
            passage = self.passages.get(name := self._names.get(delta.request_id, ""))
            if passage is not None:
                now = happening.micros / 1e6
                gives_first |= passage.first == math.inf
                self.passages[name] = Passage(passage.arrived, min(passage.first, now), now)
                self.token_times[name].extend([now] * len(delta.token_ids))
                self.token_rows[name].extend([rows] * len(delta.token_ids))
            if delta.finish is not None:
                self._open.discard(delta.request_id)
        before, self._before = self._before, happening.micros
        if not (computed := happening.outcome.micros):
            return
        woken, after_first = self._woken, self._after_first
        if woken is not None:
            before, after_first, self._woken = woken, 0.0, None
        self._after_first = 1.0 if gives_first else after_first / 2 if after_first > _LEAST_SHARE else 0.0
        if not happening.plan.moves:
            shape = shape_of(happening.plan, happening.outcome.num_tokens)
            step = MeasuredStep(shape, (happening.micros - before) / 1e6, woken is not None, after_first)
            self._steps.append((happening.micros, computed / 1e6, step))

    def timed(self, since: float = -math.inf, until: float = math.inf) -> list[tuple[float, MeasuredStep]]:
        """Steps that ended between these times, with the times at which they did: seconds since 1970."""
        return [
            # Results of steps that overlap may be taken in at once.
            (ended, step if step.seconds >= computed else step._replace(seconds=computed + self.host_seconds))
            for micros, computed, step in self._steps
            if since <= (ended := micros / 1e6 + self._wall) <= until
        ]

    def samples(self, since: float = -math.inf, until: float = math.inf) -> list[MeasuredStep]:
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
