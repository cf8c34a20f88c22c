"""What a recording says: measured steps, for a StepModel; and its requests as a trace without text."""

from collections.abc import Callable
from itertools import takewhile
from statistics import median

from octavo.cache.page_keys import keys_of
from octavo.plan.trace import Trace, TraceRequest
from octavo.recording.format import Arrived, Recording
from octavo.replay.replay import ReplayedCommit
from octavo.replay.what_if import Learned, learn
from octavo.schedule.step_costs import Sample, shape_of

_IDLE_SECONDS = 0.003  # a longer pause between two steps is no part of a step …
_IDLE_SHARE = 0.5  # … if it is also longer than this share of it


class Measured:
    """Steps of a recording. A step's time is that from the result before it to its own, as far as nothing was waited for between them: so
    it has what planning, sending and other processes took, too."""

    def __init__(self, recording: Recording) -> None:
        self._steps: list[tuple[Sample, float | None]] = []  # (by its computing alone, seconds since the one before)
        self._before = 0
        self._arrived: dict[str, int] = {}
        self.first_seconds: dict[str, float] = {}  # by request: from its arrival in the engine to its first token
        self.learned: Learned = learn(recording, self._hear)
        hosts = [between - sample.seconds for sample, between in self._steps if between is not None]
        self.host_seconds = max(0.0, median(hosts)) if hosts else 0.0

    def _hear(self, happening: object) -> None:
        if isinstance(happening, Arrived):
            self._arrived[happening.id] = happening.micros
        if isinstance(happening, ReplayedCommit):
            for delta in happening.deltas:
                if delta.request_id in self._arrived:
                    came = self._arrived.pop(delta.request_id)
                    self.first_seconds[delta.request_id] = (happening.micros - came) / 1e6
            seconds = happening.outcome.micros / 1e6
            between = (happening.micros - self._before) / 1e6
            self._before = happening.micros
            if happening.plan.moves or not seconds:
                return
            is_next = seconds <= between <= seconds + max(_IDLE_SECONDS, _IDLE_SHARE * seconds)
            sample = Sample(shape_of(happening.plan, happening.outcome.num_tokens), seconds)
            self._steps.append((sample, between if is_next else None))

    @property
    def samples(self) -> list[Sample]:
        return [
            Sample(sample.shape, sample.seconds + self.host_seconds if between is None else between)
            for sample, between in self._steps
        ]


def trace_of(recording: Recording, rename: Callable[[bytes], int]) -> Trace:
    """Times, lengths and shared pages of the recorded requests. Of contents, only which pages are equal is left: `rename` numbers
    their keys. Requests without an end are as long as they had become; such as ask for vectors are left out."""
    learned, header = learn(recording), recording.header
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
