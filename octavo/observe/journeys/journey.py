"""Journey: one HTTP request's way, from its first byte to the last byte of its response: open ones, and those that are kept.

Stages are consecutive and on one clock, so their times sum to the whole. Where a request has several choices or prompts, its
stages are those of the one that ended last; the others are in `legs`."""

import operator
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Literal

import msgspec

from octavo.messages import AdapterRef, GenerateRequest, ReadJourneys, SamplingParams
from octavo.observe.journeys.stages import EngineJourney, Stage, StageName, Track

State = Literal["waiting", "running", "finished", "failed", "aborted"]
STATES: tuple[State, ...] = ("waiting", "running", "finished", "failed", "aborted")
Making = Literal["going on", "to its end", "given up"]
MAX_RING_BYTES = 16 * 2**20
MAX_PLACEMENTS = 64  # that a journey lists
DIGITS = 6  # of seconds that are shown: microseconds
ENTRY_BYTES = 500  # what a kept journey takes beside its text: ids and table entries


class Leg(msgspec.Struct, frozen=True, gc=False):
    """One choice of one prompt."""

    prompt: int
    choice: int
    finish_reason: str | None
    output_tokens: int
    preemptions: int
    stages: list[Stage]


class Journey(msgspec.Struct, frozen=True, gc=False):
    """A request as /v1/requests shows it. Times are seconds; those of stages count from the request's first byte."""

    id: str
    state: State
    response_ids: list[str]  # of its GenerateRequests; the first is the answer's, but for "-0" where there are several
    handler: str
    received_at: float  # Unix time
    seconds: float  # until now, if it is not over
    stages: list[Stage]
    api_process: int
    status: int = 0  # HTTP; 0: no answer yet. 499: the client left
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_miss: str = (
        ""  # why no more of the first prompt was found in the prefix cache; empty: all that can be shared was
    )
    output_tokens: int = 0  # of the answer; the engine may have gone on beyond a stop string (stages say how far)
    preemptions: int = 0
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of those: in the answer, or behind its stop string
    finish_reasons: list[str | None] = []  # by choice
    first_byte_seconds: float | None = None
    detokenise_seconds: float = 0.0  # in all, most of it while the engine went on
    grammar_seconds: float = 0.0  # to check its grammar, and in the engine's steps to keep to it
    error: str = ""
    legs: list[Leg] = []  # every choice, where there are several
    note: str = ""
    replicas: list[
        dict[str, Any]
    ] = []  # of a fleet: where it was placed and why, in order; see octavo.client.client.Placement

    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage, summed over stages of the same name."""
        seconds: dict[str, float] = {}
        for stage in self.stages:
            for name, spent in (stage.stages or {stage.name: stage.end - stage.start}).items():
                seconds[name] = round(seconds.get(name, 0.0) + spent, 6)
        return seconds

    def wait_seconds(self) -> dict[str, float]:
        """Seconds in the queue by reason."""
        seconds: dict[str, float] = {}
        for stage in self.stages:
            for wait in stage.waits:
                seconds[wait.reason] = round(seconds.get(wait.reason, 0.0) + wait.seconds, 6)
        return seconds


_grammar_seconds = operator.attrgetter("grammar_seconds")

current: ContextVar["OpenJourney | None"] = ContextVar("octavo journey", default=None)
"""The journey of the HTTP request in whose task this runs."""


class OpenJourney:
    """An HTTP request on its way through an API process."""

    def __init__(self, id: str, method: str, path: str, api_process: int, received: float) -> None:
        self.id, self.method, self.path, self.api_process = id, method, path, api_process
        self.owner = b""  # of its API key (server/state/owners.py)
        self.adapter: AdapterRef | None = None  # that its requests are computed with; None: the model alone
        self.user = self.header_value = ""  # by which it may share the engine, within its key (--fairness)
        self.handler = path  # then the route's pattern, once that is known
        self.received, self.received_at = received, time.time() - (time.monotonic() - received)
        self.status = 0
        self.error = ""
        self.first_byte = self.delivered = self.ended = 0.0
        self.making: Making | None = None  # of a response that is produced even if its client leaves
        self.detokenise_seconds = self.grammar_seconds = 0.0
        self.jobs: dict[str, int] = {}  # how its jobs of compiling ended → how many (server/state/compiler.py)
        self.requests: list[str] = []  # ids of its GenerateRequests
        self.params: SamplingParams | None = None  # of the first of them
        self.trace_context: dict[str, str] = {}  # the client's W3C trace context headers
        self.prompts: list[list[int]] = []  # theirs, if the log is to show them
        self.travelled: dict[str, EngineJourney] = {}
        self.placements: list[dict[str, Any]] = []
        self._losses: list[tuple[float, float]] = []  # engines that ended meanwhile: when, and when the next was ready
        self._choice_ends: dict[tuple[str, int], tuple[str, int]] = {}  # choice → how it ended, and its tokens
        self._marks: list[tuple[StageName, float]] = []

    def reach(self, stage: StageName) -> None:
        """The end of `stage`, and of what came before it."""
        self._marks.append((stage, time.monotonic()))

    def submit(self, request: GenerateRequest, at: float) -> None:
        """The engine was given a request, at time.monotonic() `at`."""
        if not self.requests:
            self._marks.append(("tokenise", at))
            self.params = None if request.pooling else request.params
        self.requests.append(request.id)

    def took(self, started: float, now: float) -> None:
        """Detokenisation took from `started` to `now`."""
        self.detokenise_seconds += now - started
        self.delivered = now

    def finish(self, request_id: str, index: int, reason: str, num_tokens: int) -> None:
        """Record how a choice ended for the client."""
        self._choice_ends[request_id, index] = (reason, num_tokens)

    def place(self, request_id: str, placement: dict[str, Any]) -> None:
        """A router has sent one of its requests to a replica. Of many, only the last moves are kept."""
        if len(self.placements) >= MAX_PLACEMENTS:
            del self.placements[MAX_PLACEMENTS // 2]
        if len(self.requests) > 1:
            placement = {"request": self.requests.index(request_id), **placement}
        self.placements.append(placement)

    def lose_engine(self) -> None:
        """The engine that had it has ended, and its part of the journey is lost."""
        self._losses.append((time.monotonic(), 0.0))

    def find_engine(self) -> None:
        """The next engine is ready."""
        if self._losses and not self._losses[-1][1]:
            self._losses[-1] = (self._losses[-1][0], time.monotonic())

    def note(self, error: Exception) -> None:
        """Record the error's type and field. Its message may quote the client, so it is left out."""
        param = getattr(error, "param", None)
        self.error = f"{type(error).__name__} ({param[:60]})" if isinstance(param, str) else type(error).__name__

    @property
    def has_engine_part(self) -> bool:
        """Whether the engine has sent its part for all requests."""
        return len(self.travelled) == len(self.requests)

    def as_journey(self, open_parts: Iterable[EngineJourney] = ()) -> Journey:
        """The journey as it stands. `open_parts`: the engine's part of requests that have not ended there."""
        known = dict(self.travelled)
        for journey in open_parts:
            known.setdefault(journey.id, journey)
        journeys: list[EngineJourney] = []
        tracks: list[Track] = []
        for id in self.requests:
            if (part := known.get(id)) is not None:
                journeys.append(part)
                tracks += part.tracks
        last = max(tracks, key=_end_of, default=None)
        seen = 0.0 if last is None else _end_of(last)  # of an open request: when the engine was asked
        status = self.shown_status
        # A stream that can be resumed goes on when its client has left.
        ended = 0.0 if self.making == "going on" else self.ended
        has_outlived = 0 < ended < self.delivered
        end = self.delivered if has_outlived else ended or seen or time.monotonic()
        stages = self._front()
        at = stages[-1].end if stages else self.received
        if last is not None:
            # A stop string ends a response before the engine hears of it.
            is_complete = ended and self.delivered and status < 400
            if self._losses:
                lost_tokens = last.output_tokens - sum(stage.output_tokens for stage in last.stages)
                stages += self._lost_stages(at, last.stages[0].start, lost_tokens)
                at = stages[-1].end if stages else self.received
            stages += _cut(last.stages, "hand_over", at, self.delivered if is_complete else end)
        elif self.requests:
            until = min(self.delivered or end, end)
            stages += self._lost_stages(at, until, 0)
            at = stages[-1].end if stages else self.received
            stages.append(Stage("engine", at, until))
        at = stages[-1].end if stages else self.received
        if last is not None and ended and self.delivered > at:
            stages.append(Stage("detokenise", at, self.delivered))
            at = self.delivered
        if ended and not has_outlived:
            stages.append(Stage("flush" if self.requests and status < 400 else "answer", at, max(at, end)))
        return Journey(
            id=self.id,
            state=self._state(tracks, status),
            response_ids=self.requests,
            handler=self.handler,
            received_at=round(self.received_at, DIGITS),
            seconds=round(end - self.received, DIGITS),
            stages=_relative(stages, self.received),
            api_process=self.api_process,
            status=status,
            first_byte_seconds=round(self.first_byte - self.received, DIGITS) if self.first_byte else None,
            detokenise_seconds=round(self.detokenise_seconds, DIGITS),
            grammar_seconds=round(self.grammar_seconds + sum(map(_grammar_seconds, stages)), DIGITS),
            error=self.error,
            note=self._note(len(journeys)),
            replicas=self.placements,
            **_totals(journeys, self.received, self._choice_ends),
        )

    @property
    def shown_status(self) -> int:
        """200 for a response that was produced to its end after its client had left: the client may resume it."""
        return 200 if self.status == 499 and self.making == "to its end" else self.status

    def _front(self) -> list[Stage]:
        stages: list[Stage] = []
        at = self.received
        for name, when in self._marks:
            stages.append(Stage(name, at, when))
            at = when
        return stages

    def _lost_stages(self, at: float, until: float, num_tokens: int) -> list[Stage]:
        """The time in engines that ended, and without an engine. `num_tokens`: what they had sampled."""
        stages: list[Stage] = []
        for number, (lost, back) in enumerate(self._losses, 1):
            lost, back = min(max(at, lost), until), min(back or until, until)
            if lost > at:
                stages.append(Stage("engine", at, lost, num_tokens if number == len(self._losses) else 0))
            if back > lost:
                stages.append(Stage("restart", lost, back))
            at = max(lost, back)
        return stages

    def _note(self, num_parts: int) -> str:
        if self._losses:
            many = "an engine" if len(self._losses) == 1 else f"{len(self._losses)} engines"
            return f"{many} ended during this request: the stages there are unknown"
        return "" if num_parts == len(self.requests) else "the engine did not report its stages"

    def _state(self, tracks: list[Track], status: int) -> State:
        if not self.ended or self.making == "going on":
            return _engine_state(tracks)
        # A client that ends a resumable stream may still be connected to it, and gets an error as its last event.
        has_left = status == 499 or self.making == "given up"
        if has_left and not (tracks and len(self._choice_ends) == len(tracks)):
            return "aborted"
        return "failed" if (status >= 400 and status != 499) or self.error else "finished"


def open_journey(journey: EngineJourney, now: float) -> Journey:
    """A request of which only the engine's part is known: it is not over, or another API process has it."""
    last = max(journey.tracks, key=_end_of)
    received = journey.received or last.stages[0].start
    return Journey(
        id=journey.http_id or journey.id,
        state=_engine_state(journey.tracks),
        response_ids=[journey.id],
        handler="",
        received_at=round(time.time() - (time.monotonic() - received), DIGITS),
        seconds=round(now - received, DIGITS),
        stages=_relative(_cut(last.stages, "before", received, now), received),
        api_process=journey.origin,
        note=f"API process {journey.origin} has the stages before the engine, and reports them when the request is over",
        **_totals([journey], received, {}),
    )


def _engine_state(tracks: Iterable[Track]) -> State:
    stages = [track.stages[-1].name for track in tracks if track.finish_reason is None]
    return "waiting" if stages and all(name in ("queue", "preempted") for name in stages) else "running"


def _totals(
    journeys: list[EngineJourney], received: float, choice_ends: Mapping[tuple[str, int], tuple[str, int]]
) -> dict[str, Any]:
    prompt_tokens = output_tokens = preemptions = drafted_tokens = accepted_tokens = 0
    tracks: list[tuple[int, Track]] = []
    finish_reasons: list[str | None] = []
    prefill: Stage | None = None  # the first, of a journey's first choice
    for number, journey in enumerate(journeys):
        prompt_tokens += journey.prompt_tokens
        for stage in () if prefill is not None else journey.tracks[0].stages:
            if stage.name == "prefill":
                prefill = stage
                break
        for track in journey.tracks:
            own = (track.finish_reason, track.output_tokens)
            reason, num_tokens = choice_ends.get((journey.id, track.index), own)
            finish_reasons.append(reason)
            output_tokens += num_tokens
            preemptions += track.preemptions
            drafted_tokens += track.drafted_tokens
            accepted_tokens += track.accepted_tokens
            tracks.append((number, track))
    return {
        "prompt_tokens": prompt_tokens,
        "cached_tokens": 0 if prefill is None else prefill.cached_tokens,
        "cache_miss": "" if prefill is None else prefill.missed,
        "output_tokens": output_tokens,
        "preemptions": preemptions,
        "drafted_tokens": drafted_tokens,
        "accepted_tokens": accepted_tokens,
        "finish_reasons": finish_reasons,
        "legs": [_leg(number, track, received) for number, track in tracks] if len(tracks) > 1 else [],
    }


def _leg(prompt: int, track: Track, received: float) -> Leg:
    stages = _relative(track.stages, received)
    return Leg(prompt, track.index, track.finish_reason, track.output_tokens, track.preemptions, stages)


def _end_of(track: Track) -> float:
    return track.stages[-1].end


def _cut(stages: list[Stage], before: StageName, start: float, end: float) -> list[Stage]:
    """The stages from `start` to `end`, without a gap: the time before the first is `before`."""
    cut = [Stage(before, start, min(stages[0].start, end))] if stages[0].start > start else []
    at = cut[-1].end if cut else start
    for stage in stages:
        if stage.start >= end:
            break
        cut.append(msgspec.structs.replace(stage, start=at, end=min(stage.end, end)))
        at = cut[-1].end
    return cut


def _relative(stages: list[Stage], zero: float) -> list[Stage]:
    return [
        msgspec.structs.replace(stage, start=round(stage.start - zero, DIGITS), end=round(stage.end - zero, DIGITS))
        for stage in stages
    ]


class JourneyRing:
    """The latest journeys, as text, within a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[int, tuple[list[str], bytes, float, bytes]] = OrderedDict()  # oldest first
        self._is_mixed = False  # journeys of an earlier engine came in by API process, and are not sorted yet
        # The latest with that id, and of each owner the latest: clients choose ids, and two keys may choose the same.
        self._by_id: dict[str | tuple[bytes, str], int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, ids: list[str], journey: bytes, at: float = 0.0, is_old: bool = False, owner: bytes = b"") -> None:
        """`at`: when it ended. `is_old`: it may be older than the journeys that are kept."""
        number, self._next = self._next, self._next + 1
        self._kept[number] = (ids, journey, at, owner)
        self._is_mixed |= is_old
        self._num_bytes += len(journey) + ENTRY_BYTES
        for name in _names(ids, owner):
            self._by_id[name] = number
        while self._num_bytes > self._max_bytes:
            self._drop_oldest()

    def find(self, id: str, owner: bytes | None = None) -> bytes | None:
        """`owner` None: of any owner."""
        number = self._by_id.get(id if owner is None or owner == b"" else (owner, id))
        if number is None or owner not in (None, self._kept[number][3]):
            return None
        return self._kept[number][1]

    def latest(self, state: str, limit: int, owner: bytes | None = None) -> list[bytes]:
        """Latest first. `state` empty: of any state. `owner` None: of any owner."""
        mark = b'"state":"%s"' % state.encode()
        found: list[bytes] = []
        if self._is_mixed:
            self._kept = OrderedDict(sorted(self._kept.items(), key=lambda item: item[1][2]))
            self._is_mixed = False
        for _, journey, _, whose in reversed(self._kept.values()):
            if len(found) == limit:
                break
            if owner in (None, whose) and (not state or mark in journey):
                found.append(journey)
        return found

    def _drop_oldest(self) -> None:
        number, (ids, journey, _, owner) = self._kept.popitem(last=False)
        self._num_bytes -= len(journey) + ENTRY_BYTES
        for name in _names(ids, owner):
            if self._by_id.get(name) == number:
                del self._by_id[name]


def _names(ids: list[str], owner: bytes) -> Iterable[str | tuple[bytes, str]]:
    """What a journey is found by."""
    return [*ids, *((owner, id) for id in ids)] if owner else ids


def journeys_json(open_parts: list[EngineJourney], ring: JourneyRing, asked: ReadJourneys) -> str:
    """A JSON list of the journeys that the engine process has, open ones first."""
    if asked.is_raw:
        return msgspec.json.encode(open_parts).decode()
    request_id, state, limit = asked.request_id, asked.state, asked.limit
    now = time.monotonic()
    going = [
        journey for journey in (open_journey(journey, now) for journey in open_parts) if state in ("", journey.state)
    ]
    texts = [msgspec.json.encode(journey) for journey in going[:limit]]
    if request_id:
        found = ring.find(request_id, asked.owner)
        texts += [] if found is None or texts else [found]
    elif len(texts) < limit and state not in ("waiting", "running"):
        texts += ring.latest(state, limit - len(texts), asked.owner)
    return "[" + b",".join(texts).decode() + "]"
