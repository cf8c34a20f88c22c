"""EngineJournal: keeps every request's way through the engine, at a cost per step that does not depend on its rows.

A row that decodes costs nothing: its steps are read off running totals (step_totals.py) when it leaves. Only requests that enter,
compute a part of their prompt, go back to the queue or end are touched, and the head of a queue that does not move."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from octavo.cache.kv_cache import MissReason
from octavo.messages import Abort, GenerateRequest, StepPlan
from octavo.observe.journeys.recent_prompts import Difference, RecentPrompts
from octavo.observe.journeys.stages import (
    MAX_CHUNKS,
    MAX_STAGES,
    Chunk,
    EngineJourney,
    Stage,
    StageName,
    Track,
    Wait,
    WaitReason,
    fold,
)
from octavo.observe.journeys.step_totals import MS_BOUNDS, ROW_BOUNDS, Look, StepTotals, between, histogram
from octavo.observe.step_observer import StepObserver, StepTimes
from octavo.schedule.request import Request
from octavo.schedule.results import Committed, GrammarsReady, Planned, Removed, Returned


class _Queue:
    """How long the queue's head has waited since the start, by reason. A request's wait is the difference of two looks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.head: _Track | None = None
        self.reason: WaitReason | None = None  # what the head lacked in the last plan
        self.since = 0.0

    def planned(self, head: "_Track | None", reason: WaitReason | None, now: float) -> None:
        if self.reason is not None:
            self.seconds[self.reason] = self.seconds.get(self.reason, 0.0) + now - self.since
            if self.head is not None:
                self.head.wait(self.reason, now - self.since, 0)
        if reason is not None and head is not None:
            head.wait(reason, 0.0, 1)
        self.head, self.reason, self.since = head, reason, now

    def look(self, now: float) -> dict[str, float]:
        seconds = dict(self.seconds)
        if self.reason is not None:
            seconds[self.reason] = seconds.get(self.reason, 0.0) + now - self.since
        return seconds


class _Track:
    """One choice of an open request."""

    __slots__ = (
        "cached",
        "capped_steps",
        "chunks",
        "computed",
        "difference",
        "dropped",
        "epoch",
        "first_look",
        "grammar_at",
        "grammar_wait_since",
        "has_grammar",
        "index",
        "is_ended",
        "is_first",
        "is_pooled",
        "missed",
        "name",
        "num_accepted",
        "num_drafted",
        "num_output",
        "output_at",
        "own_waits",
        "preemptions",
        "queue_look",
        "reason",
        "stages",
        "start",
        "step_at",
        "swapped",
    )  # fmt: skip

    def __init__(
        self, index: int, request: GenerateRequest, now: float, queue_look: dict[str, float], step_at: int
    ) -> None:
        self.index = index
        self.is_first = not (request.part or index)  # of its HTTP request: the others give way
        self.is_pooled = request.pooling is not None  # it gets a vector instead of tokens
        self.has_grammar = bool(request.params.grammar)
        self.grammar_at = 0.0  # seconds that grammars had taken when the present stage began
        self.name: StageName = "queue"
        self.start = now
        self.stages: list[Stage] = []
        self.epoch = 0  # stages so far: a chunk of an earlier one no longer counts
        self.is_ended = False
        self.reason: str | None = None
        self.num_output = self.output_at = 0  # tokens now, and when the present stage began
        self.preemptions = 0
        self.num_drafted = self.num_accepted = 0
        self.missed: MissReason = ""
        self.difference: Difference | None = None
        self.grammar_wait_since: float | None = None  # None: it does not wait for a grammar
        self.enter_queue(queue_look, step_at)
        self.enter_row(0)

    def enter_queue(
        self, queue_look: dict[str, float], step_at: int, num_computed: int = 0, is_swapped: bool = False
    ) -> None:
        self.queue_look, self.step_at = queue_look, step_at
        self.own_waits: dict[str, tuple[float, int]] = {}
        self.swapped = num_computed if is_swapped else 0
        self.dropped = 0 if is_swapped else num_computed

    def has(self, request: Request) -> None:
        """Read how many tokens it has by now."""
        self.num_output = 0 if self.is_pooled else len(request.tokens) - request.prompt_len
        self.num_drafted, self.num_accepted = request.num_drafted, request.num_accepted

    def wait(self, reason: str, seconds: float, steps: int) -> None:
        before = self.own_waits.get(reason, (0.0, 0))
        self.own_waits[reason] = (before[0] + seconds, before[1] + steps)

    def enter_row(self, cached: int) -> None:
        self.cached, self.computed, self.capped_steps = cached, 0, 0
        self.chunks: list[Chunk] = []
        self.first_look = Look()

    def add_chunk(self, chunk: Chunk) -> None:
        self.computed += chunk.tokens
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
            return
        last = self.chunks[-1]
        tokens, seconds = last.tokens + chunk.tokens, last.seconds + chunk.seconds
        self.chunks[-1] = Chunk(last.step, last.start, tokens, seconds, last.merged + 1, chunk.limit_ms)


class _Journey:
    __slots__ = ("num_open", "request", "tracks")

    def __init__(self, request: GenerateRequest, tracks: list[_Track]) -> None:
        self.request, self.tracks = request, tracks
        self.num_open = len(tracks)


class EngineJournal(StepObserver):
    def __init__(self) -> None:
        self.on_end: Callable[[EngineJourney], None] | None = None  # None: journeys are not sent
        self._journeys: dict[str, _Journey] = {}
        self._loads: dict[
            str, tuple[float, int]
        ] = {}  # request that arrives next → since when it waited for how many tokens
        self._adapters: dict[str, float] = {}  # request that arrives next → since when it waited for its adapter
        self._grammar_seconds = 0.0  # that grammars took in all steps
        self._tally = StepTotals()
        self._queue = _Queue()
        self._num_plans = 0
        self._last_commit = 0.0
        self._prompts = RecentPrompts()
        self._prompting: dict[
            int, _Track
        ] = {}  # row → the choice that computes a prompt there, or will in the next step
        self._chunks: dict[int, list[tuple[_Track, int, Chunk, bool]]] = {}  # step in flight → its parts of prompts

    # ── events of the loop ──

    def waited_for_load(self, request_id: str, since: float, num_tokens: int) -> None:
        self._loads[request_id] = (since, num_tokens)

    def waited_for_adapter(self, request_id: str, since: float) -> None:
        self._adapters[request_id] = since

    def arrived(self, request: GenerateRequest, now: float, awaits_grammar: bool) -> None:
        look = self._queue.look(now)
        loaded = self._loads.pop(request.id, None)
        adapter_since = self._adapters.pop(request.id, now)
        tracks = [_Track(index, request, now, look, self._num_plans) for index in range(request.params.n)]
        if adapter_since < (end := now if loaded is None else loaded[0]):
            for track in tracks:
                track.stages.append(Stage("adapter", adapter_since, end))
        if loaded is not None:
            for track in tracks:
                track.stages.append(Stage("load", loaded[0], now, cached_tokens=loaded[1]))
        journey = self._journeys[request.id] = _Journey(request, tracks)
        for track, begun in zip(tracks, request.begun, strict=False):  # it outlived an engine
            if begun is None:
                track.is_ended = True
                journey.num_open -= 1
            else:
                track.num_output = track.output_at = len(begun)
        for track in tracks if awaits_grammar else ():
            track.grammar_wait_since = now

    def removed(self, abort: Abort, removed: Removed, now: float) -> None:
        self._return(removed.returned, now)
        self._end(removed.ended, {(request.id, request.index): abort.reason for request in removed.ended}, now)
        self._let_in(removed.let_in, now)

    def grammars_ready(self, ready: GrammarsReady, now: float) -> None:
        self._let_in(ready.let_in, now)

    def planned(self, planned: Planned, now: float) -> None:
        if planned.returned:
            self._return(planned.returned, now)
        if planned.admitted:
            self._admit(planned.admitted, planned.plan, now)
        self._num_plans += 1
        queue, reason = self._queue, planned.head_waits_for
        if reason is not None or queue.reason is not None:
            queue.planned(None if planned.head is None else self._track(planned.head), reason, now)
        if self._prompting:
            self._note_chunks(planned, now)
        if planned.forked:
            self._fork(planned.forked, now)
        if planned.queued:
            self._queue_apart(planned.queued, now)

    def committed(self, committed: Committed, times: StepTimes) -> None:
        now, plan = times.now, committed.plan
        self._grammar_seconds += committed.result.grammar_seconds
        num_drafted = sum(len(draft.tokens) for draft in plan.drafts) if plan.drafts else 0
        self._tally.add(now - self._last_commit, len(plan.rows), committed.num_tokens - num_drafted)
        self._last_commit = now
        if self._chunks and (chunks := self._chunks.pop(plan.step, None)) is not None:
            self._commit_chunks(chunks, now)
        if committed.ended:
            deltas = committed.deltas
            reasons = {(delta.request_id, delta.index): delta.finish.reason for delta in deltas if delta.finish}
            self._end(committed.ended, reasons, now)
            if committed.let_in:
                self._let_in(committed.let_in, now)

    def prefixes_reset(self, now: float) -> None:
        self._prompts.clear()

    def dropped(self) -> None:
        self._journeys.clear()
        self._prompting.clear()
        self._chunks.clear()

    # ── for a look between two steps ──

    def open_parts(
        self, requests: Iterable[Request], now: float, request_id: str = "", owner: bytes | None = None
    ) -> list[EngineJourney]:
        """All open requests as they stand; or one of them, by its own id or that of its HTTP request; or those of one owner.
        `requests`: the scheduler's, for the number of their tokens."""
        journeys: Iterable[_Journey] = self._journeys.values()
        if owner is not None:
            journeys = [journey for journey in journeys if journey.request.owner == owner]
        if request_id:
            journeys = [journey for journey in journeys if request_id in (journey.request.id, journey.request.http_id)]
        for request in requests:
            track = self._track(request)
            if track is not None:
                track.has(request)
        return [self._as_it_stands(journey, now) for journey in journeys]

    def waits(self, now: float) -> dict[str, float]:
        """Seconds for which the queue's head has waited since the start, by reason."""
        return self._queue.look(now)

    # ── inside ──

    def _let_in(self, requests: Iterable[Request], now: float) -> None:
        """Their grammars are ready: from now on they wait as all others do."""
        look = self._queue.look(now)
        for request_id in dict.fromkeys(request.id for request in requests):
            journey = self._journeys.get(request_id)
            for track in () if journey is None else journey.tracks:
                if track.grammar_wait_since is not None:
                    since, track.grammar_wait_since = track.grammar_wait_since, None
                    track.queue_look, track.step_at = look, self._num_plans
                    track.wait("grammar", now - since, 0)

    def _return(self, returned: Iterable[Returned], now: float) -> None:
        for leaver in returned:
            request = leaver.request
            track = self._track(request)
            if track is not None:
                self._forget_row(track)
                track.has(request)
                # A choice whose leader was aborted waits again too, though it was not preempted.
                self._next_stage(track, "preempted" if request.num_preemptions > track.preemptions else "queue", now)
                track.preemptions = request.num_preemptions
                look = self._queue.look(now)
                track.enter_queue(look, self._num_plans, leaver.num_computed, leaver.is_swapped)
                self._queue_apart(request.followers, now)  # their prompt waits with it

    def _queue_apart(self, requests: Iterable[Request], now: float) -> None:
        """Choices whose prompt is not being computed any more, and that have no row."""
        for request in requests:
            track = self._track(request)
            if track is not None and track.name == "prefill":
                self._next_stage(track, "queue", now)
                track.enter_queue(self._queue.look(now), self._num_plans)

    def _admit(self, requests: Sequence[Request], plan: StepPlan, now: float) -> None:
        for request in requests:
            column = plan.rows.index(request.row)
            journey = self._journeys.get(request.id)
            if journey is None:
                continue
            track = journey.tracks[request.index]
            is_first, was_swapped = not track.stages, track.swapped > 0
            track.has(request)
            again = track.preemptions or track.num_output
            name: StageName = "decode" if was_swapped else "recompute" if again else "prefill"
            self._next_stage(track, name, now)
            track.enter_row(plan.starts[column])
            if is_first and not again:
                self._note_miss(track, journey.request, request.miss)
            if was_swapped:
                track.first_look = self._tally.look()
            else:
                self._prompting[request.row] = track
            if is_first and not again:  # with it, the choices that will share its prompt
                for other in journey.tracks:
                    if not other.stages and not other.is_ended:
                        self._next_stage(other, "prefill", now)

    def _note_miss(self, track: _Track, source: GenerateRequest, miss: MissReason) -> None:
        track.missed = miss
        name = source.http_id or source.id
        difference = self._prompts.add(source.owner, name, source.prompt_ids, compare=miss == "new")
        # Fewer tokens in common than the cache had: the prompt that it continues is no longer remembered.
        track.difference = difference if difference is not None and difference.at >= track.cached else None

    def _fork(self, requests: Iterable[Request], now: float) -> None:
        """Choices that share a computed prompt now, and compute its last token in the next step."""
        for request in requests:
            track = self._track(request)
            if track is not None:
                if track.name == "queue":  # its leader had been preempted
                    self._next_stage(track, "prefill", now)
                    track.enter_row(0)
                track.cached = request.prompt_len - 1
                self._prompting[request.row] = track

    def _commit_chunks(self, chunks: "list[tuple[_Track, int, Chunk, bool]]", now: float) -> None:
        for track, epoch, planned, samples in chunks:
            if track.epoch != epoch:
                continue  # it has left its row since
            seconds = now - planned.seconds  # when it was planned
            track.add_chunk(msgspec.structs.replace(planned, seconds=seconds))
            if samples:
                track.num_output += not track.is_pooled
                self._next_stage(track, "decode", now)
                track.first_look = self._tally.look()

    def _end(self, requests: Iterable[Request], reasons: Mapping[tuple[str, int], str], now: float) -> None:
        """Choices that will not go on. `reasons`: by request and choice."""
        for request in requests:
            journey = self._journeys.get(request.id)
            if journey is None or journey.tracks[request.index].is_ended:
                continue
            track = journey.tracks[request.index]
            self._forget_row(track)
            track.has(request)
            self._close(track, now)
            track.is_ended = True
            track.reason = reasons.get((request.id, request.index), "abort")
            journey.num_open -= 1
            if journey.num_open == 0:
                del self._journeys[request.id]
                if self.on_end is not None:
                    self.on_end(
                        _engine_journey(journey, [_seen(track, None) for track in journey.tracks if track.stages])
                    )

    def _track(self, request: Request) -> _Track | None:
        journey = self._journeys.get(request.id)
        return None if journey is None else journey.tracks[request.index]

    def _forget_row(self, track: _Track) -> None:
        if self._prompting:
            for row, other in self._prompting.items():
                if other is track:
                    del self._prompting[row]
                    return

    def _note_chunks(self, planned: Planned, now: float) -> None:
        plan, parts = planned.plan, []
        capped, limit_ms = planned.capped, round(planned.limit_seconds * 1e3, 3)
        if capped is not None and capped.row >= 0 and (track := self._prompting.get(capped.row)) is not None:
            track.capped_steps += 1
        drafted = {draft.at: len(draft.tokens) for draft in plan.drafts} if self._prompting else {}
        for row, track in list(self._prompting.items()):
            try:
                at = plan.rows.index(row)
            except ValueError:
                continue  # no room in this step
            samples = plan.samples[at]
            cut_to = limit_ms if capped is not None and capped.row == row else 0.0
            # A last chunk of one token may have a draft behind it, which is not part of the prompt.
            num_tokens = plan.counts[at] - drafted.get(at, 0)
            chunk = Chunk(plan.step, plan.starts[at], num_tokens, now, limit_ms=cut_to)
            parts.append((track, track.epoch, chunk, samples))
            if samples:
                del self._prompting[row]
        if parts:
            self._chunks[plan.step] = parts

    def _next_stage(self, track: _Track, name: StageName, now: float) -> None:
        self._close(track, now)
        track.name, track.start, track.output_at = name, now, track.num_output
        track.grammar_at = self._grammar_seconds

    def _close(self, track: _Track, now: float) -> None:
        track.epoch += 1
        if track.name != "decode" or now > track.start:
            track.stages.append(self._stage(track, now))
            if len(track.stages) > MAX_STAGES:
                fold(track.stages)

    def _stage(self, track: _Track, now: float) -> Stage:
        """The track's present stage, if it ended now."""
        output = max(0, track.num_output - track.output_at)
        grammar = self._grammar_seconds - track.grammar_at if track.has_grammar else 0.0
        match track.name:
            case "queue" | "preempted":
                waits = self._waits(track, now)
                return Stage(track.name, track.start, now, output, waits, track.swapped, track.dropped)
            case "decode":
                steps = between(track.first_look, self._tally.look())
                return Stage(
                    "decode",
                    track.start,
                    now,
                    output,
                    steps=steps.num_steps,
                    mixed_steps=steps.num_mixed,
                    mean_rows=round(steps.num_rows / steps.num_steps, 2) if steps.num_steps else 0.0,
                    rows=histogram(steps.by_rows, ROW_BOUNDS),
                    ms=histogram(steps.by_ms, MS_BOUNDS),
                    grammar_seconds=grammar,
                )
            case _:
                cached, computed = track.cached, track.computed
                chunks = list(track.chunks)
                is_prefill = track.name == "prefill"
                difference = track.difference if is_prefill else None
                return Stage(
                    track.name,
                    track.start,
                    now,
                    output,
                    cached_tokens=cached,
                    computed_tokens=computed,
                    missed=track.missed if is_prefill else "",
                    differs_at=None if difference is None else difference.at,
                    differs_from="" if difference is None else difference.request_id,
                    chunks=chunks,
                    capped_steps=track.capped_steps,
                    grammar_seconds=grammar,
                )

    def _waits(self, track: _Track, now: float) -> list[Wait]:
        """The time in the queue, divided by reason."""
        if track.grammar_wait_since is not None:
            return [Wait("grammar", now - track.grammar_wait_since)]
        own = dict(track.own_waits)
        queue = self._queue
        if queue.head is track and queue.reason is not None:
            before = own.get(queue.reason, (0.0, 0))
            own[queue.reason] = (before[0] + now - queue.since, before[1])
        behind: dict[str, float] = {}  # what the heads lacked, while others than this one were the head
        for reason, waited in queue.look(now).items():
            waited = waited - track.queue_look.get(reason, 0.0) - own.get(reason, (0.0, 0))[0]
            if waited > 1e-6:
                behind[reason] = round(waited, 6)
        waits: list[Wait] = []
        own_seconds, own_steps = 0.0, 0
        for reason, (seconds, steps) in own.items():
            waits.append(Wait(reason, seconds, steps))  # type: ignore[arg-type]
            own_seconds += seconds
            own_steps += steps
        order = sum(behind.values())
        if behind:
            num_steps = self._num_plans - track.step_at - own_steps
            waits.append(Wait("order" if track.is_first else "turn", order, max(0, num_steps), behind))
        rest = now - track.start - own_seconds - order
        if rest > 1e-6:
            waits.append(Wait("step", rest))
        return waits

    def _as_it_stands(self, journey: _Journey, now: float) -> EngineJourney:
        tracks = [track for track in journey.tracks if track.stages or not track.is_ended]
        return _engine_journey(journey, [_seen(t, None if t.is_ended else self._stage(t, now)) for t in tracks])


def _seen(track: _Track, present: Stage | None) -> Track:
    stages = track.stages if present is None else [*track.stages, present]
    return Track(
        track.index, stages, track.num_output, track.preemptions, track.reason, track.num_drafted, track.num_accepted
    )


def _engine_journey(journey: _Journey, tracks: list[Track]) -> EngineJourney:
    request = journey.request
    return EngineJourney(request.id, request.http_id, request.origin, request.arrived, len(request.prompt_ids), tracks)
