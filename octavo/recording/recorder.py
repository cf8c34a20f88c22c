"""Recorder: keeps the scheduler's inputs in files of bounded size, so that its plans can be made again. Steps do not
wait for files: records go to shared memory, and a thread writes them out. Only taking the scheduler's state, now and then, delays a step.

Files roll: each begins with the scheduler's state, so the oldest can be removed at any time. If records come faster than the thread
can write, or the disk is full, they are dropped, with one warning; recording goes on later with a new state."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from octavo.messages import Abort, FinishReason, GenerateRequest, TokenDelta
from octavo.observe.step_observer import StepEnd, StepObserver, StepTimes
from octavo.recording.format import (
    SEGMENT,
    Aborted,
    Arrived,
    Costed,
    Forgotten,
    Header,
    Limited,
    LoadBegan,
    LoadEnded,
    Lost,
    Marked,
    Outcome,
    PrefixesHeld,
    Prepared,
    Record,
    State,
    Stepped,
    Ticked,
    digest,
    drafts_of,
    framed,
    gap_chunk,
    grammar_names,
    owner_names,
    state_chunk,
    stream_chunk,
    wishes_of,
    without_tokens,
)
from octavo.recording.ring import SIZE, RecordingRing
from octavo.schedule import Scheduler
from octavo.schedule.results import Committed, GrammarsReady, Removed
from octavo.schedule.snapshot import Manner, take
from octavo.schedule.step_costs import StepCosts

log = logging.getLogger("octavo.engine")

FLUSH_SECONDS = 0.2
RETRY_SECONDS = 10.0
MOST_RETRY_SECONDS = 640.0  # after states that were too large: taking one delays a step
TICKS_PER_RECORD = 16  # steps without an event that are written as one record
SEGMENTS = 4  # files that share the limit
_RESERVE = 64  # bytes of the ring that are kept for the record that says that it is full


class Recorder(StepObserver):
    def __init__(
        self,
        segments: "Segments",
        header: Header,
        ring: RecordingRing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._segments, self._header, self._ring, self._clock = segments, header, ring, clock
        self.is_due = True  # the state is to be taken as soon as nothing is in flight
        self._with_tokens = with_tokens = header.with_tokens
        self._name: Callable[[str], str] = str if with_tokens else grammar_names()
        self._manner = Manner(
            lambda params: wishes_of(params, with_tokens, self._name),
            (lambda tokens: tokens) if with_tokens else (lambda tokens: []),
            (lambda candidates, stop_ids: candidates) if with_tokens else without_tokens,
            self._name,
            owner_names() if with_tokens else None,
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._is_lost = True  # until the first state
        self._is_rolling = False  # a state was taken, and its file does not exist yet
        self._num_rows = -1  # of the previous plan; −1: none
        self._ticks: list[tuple[float, int, float, int]] = []  # steps that are not written yet: a Ticked's columns
        self._states: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._is_closing = False
        self._done: list[tuple[Committed, StepTimes]] = []  # steps that were committed since the last record of one
        self._scheduler: Scheduler  # since the first state
        ring.reset()
        self._thread = threading.Thread(target=self._write, name="octavo-recorder", daemon=True)
        self._thread.start()

    # ── the stepping thread ──

    def arrived(self, request: GenerateRequest, now: float, awaits_grammar: bool) -> None:
        if self._is_lost:
            return
        with_tokens, begun = self._with_tokens, request.begun
        self._put(
            Arrived(
                int(now * 1e6),
                request.id,
                len(request.prompt_ids),
                request.prompt_ids if with_tokens else [],
                self._manner.wishes(request.params),
                request.stop_ids,
                [None if tokens is None else len(tokens) for tokens in begun],
                begun if with_tokens else [],
                request.pooling,
                request.needs_one_step,
                request.wants_progress,
                request.priority,
                int(request.arrived * 1e6),
                request.response_id,
                request.tenant,
                request.weight,
                b"" if self._manner.owner is None else self._manner.owner(request.owner),
            )
        )

    def removed(self, abort: Abort, removed: Removed, now: float) -> None:
        self._put(Aborted(int(now * 1e6), abort.request_id, abort.index, abort.reason))

    def grammars_ready(self, ready: GrammarsReady, now: float) -> None:
        for grammar, num_bytes in ready.grammars.items():
            self._put(Prepared(int(now * 1e6), self._name(grammar), num_bytes))

    def prefixes_reset(self, now: float) -> None:
        self._put(Forgotten(int(now * 1e6)))

    def costs_learned(self, costs: StepCosts, now: float) -> None:
        self._put(Costed(int(now * 1e6), costs))

    def idle_limited(self, num_warm: int, now: float) -> None:
        self._put(Limited(int(now * 1e6), num_warm))

    def load_began(self, ticket: int, held: list[bytes], count: int, now: float) -> None:
        self._put(LoadBegan(int(now * 1e6), ticket, held, count))

    def load_ended(self, ticket: int, count: int, keys: list[bytes], now: float) -> None:
        self._put(LoadEnded(int(now * 1e6), ticket, count, keys))

    def prefixes_held(self, held: list[bytes], released: list[bytes], now: float) -> None:
        self._put(PrefixesHeld(int(now * 1e6), held, released))

    def needs_drain(self) -> bool:
        return self.is_due

    def committed(self, committed: Committed, times: StepTimes) -> None:
        self._done.append((committed, times))

    def stepped(self, end: StepEnd) -> None:
        """Record a step, whether or not its plan was empty. Most are uneventful (Ticked): they are written several at a time, and nothing of them is
        kept but four numbers, so that their memory can be reused at once."""
        plan, now, is_drained = end.planned.plan, end.now, not end.num_in_flight
        done, self._done = self._done, []
        checksum = digest(plan, self._num_rows)
        self._num_rows = len(plan.rows)
        if len(done) == 1 and not (self._with_tokens or plan.enters or plan.leaves or plan.drafts):
            committed, times = done[0]
            result = committed.result
            is_plain = not (result.last or result.failures or result.candidates or result.late or result.runs)
            if is_plain and not committed.ended:
                self._ticks.append((now, checksum, times.compute_seconds, committed.num_tokens))
                if len(self._ticks) == TICKS_PER_RECORD:
                    self._write_ticks()
                if self.is_due and is_drained:
                    self.take(self._scheduler)
                return
        outcomes = [self._outcome(committed, times.compute_seconds) for committed, times in done]
        self._write_ticks()
        self._put(Stepped(int(now * 1e6), checksum, outcomes, self._keys(), drafts_of(plan)))
        # While the engine is idle, taking the state delays no request.
        is_time = self._scheduler.is_idle and self._segments.is_half_full and not self._is_rolling
        if is_drained and (self.is_due or is_time):
            self.take(self._scheduler)

    def _write_ticks(self) -> None:
        if not self._ticks:
            return
        times, digests, seconds, num_tokens = zip(*self._ticks, strict=True)
        self._ticks = []
        micros, step_micros = [int(now * 1e6) for now in times], [int(each * 1e6) for each in seconds]
        if not self._is_lost:
            self._write_down(
                framed(self._encode(Ticked(micros, list(digests), step_micros, list(num_tokens), self._keys())))
            )

    def _keys(self) -> bytes:
        cache = self._scheduler.cache
        keys = cache.keys_made
        if not keys:
            return b""
        cache.keys_made = []
        return b"".join(keys)

    def _outcome(self, committed: Committed, seconds: float) -> Outcome:
        result, deltas, ended = committed.result, committed.deltas, committed.ended
        ends: list[tuple[str, int, FinishReason]] = []
        if ended:
            ends = [(delta.request_id, delta.index, _end_of(delta)) for delta in deltas if delta.finish is not None]
        candidates = result.candidates
        if candidates and not self._with_tokens:
            stop_ids = {
                stop for each in (*self._scheduler.requests(), *ended) if each.special for stop in each.stop_ids
            }
            candidates = [without_tokens(each, stop_ids) for each in candidates]
        tokens = result.tokens if self._with_tokens else []
        return Outcome(
            int(seconds * 1e6),
            committed.num_tokens,
            tokens,
            ends,
            result.last,
            list(result.failures),
            candidates,
            result.late,
            result.runs,
            committed.taken,
            result.drafted,
        )

    def take(self, scheduler: Scheduler) -> None:
        """Take the scheduler's state and begin a new file with it. Nothing may be in flight."""
        self.is_due, self._is_rolling = False, True
        self._write_ticks()
        self._scheduler = scheduler
        if not self._with_tokens:
            scheduler.cache.keys_made = []
        now = self._clock()
        header = msgspec.structs.replace(self._header, wall=time.time(), clock=now)
        state = self._encode(State(header, take(scheduler, self._manner)))
        self._is_lost = False
        self._num_rows = -1
        self._states.put((self._ring.head, state))
        self._put(Marked(int(now * 1e6)))
        self._wake.set()

    def _put(self, record: Record) -> None:
        self._write_ticks()
        if not self._is_lost:
            self._write_down(framed(self._encode(record)))

    def _write_down(self, data: bytes) -> None:
        room = self._ring.put(data, _RESERVE)
        if room < 0:
            self._ring.put(framed(self._encode(Lost(int(self._clock() * 1e6)))), 0)
            self._is_lost = True
            self._segments.complain("more comes than can be written")
        elif room < SIZE // 2:
            self._wake.set()

    # ── the writing thread ──

    def _write(self) -> None:
        while not self._is_closing:
            self._wake.wait(FLUSH_SECONDS)
            self._wake.clear()
            self._flush()
        self._flush()

    def _flush(self) -> None:
        segments, ring = self._segments, self._ring
        # Read before the states: records that follow a state must not get into the file before it.
        head = ring.head
        with contextlib.suppress(queue.Empty):
            while True:
                position, state = self._states.get_nowait()
                self._flush_to(position)
                segments.begin(state, position)
                self._is_rolling = False
        self._flush_to(head)
        # Records were dropped, or could not be written: once there is room again, begin with a new state.
        if segments.wants_state or (self._is_lost and not self.is_due and segments.can_retry):
            self.is_due = True

    def _flush_to(self, end: int) -> None:
        start = self._ring.tail
        if end > start:
            self._segments.append(stream_chunk(self._ring.between(start, end), start))
            self._ring.tail = end

    def closed(self) -> None:
        self.close()

    def dropped(self) -> None:
        """End the recording here: what follows a gap could not be replayed. The thread writes what there is, and ends."""
        self._scheduler.cache.keys_made = None
        self._ticks, self._done = [], []
        self._put(Lost(int(self._clock() * 1e6)))
        self._is_lost = True
        self._is_closing = True
        self._wake.set()

    def close(self) -> None:
        """Write everything that was recorded. Called by the stepping thread, or when there is none."""
        self._write_ticks()
        self._is_closing = True
        self._wake.set()
        self._thread.join(5)
        self._segments.close()


def _end_of(delta: TokenDelta) -> FinishReason:
    """How its last token ended it. "length" without a token: a stop token, which its grammar forced because of max_tokens."""
    assert delta.finish is not None
    return "stop" if delta.finish.reason == "length" and not delta.token_ids else delta.finish.reason


class Segments:
    """A sequence of files, together within a limit of bytes. A disk that is full, or gone, is reported once and tried again."""

    def __init__(self, folder: Path, name: str, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._name, self._limit, self._now = folder, name, limit, now
        self._file = -1  # descriptor; −1: none is open
        self._files: list[tuple[Path, int]] = []  # closed files with their sizes, the oldest first
        self._path = Path()
        self._size = 0
        self._count = 0
        self._failed_at: float | None = None
        self._pause = RETRY_SECONDS  # before the next try
        self._has_complained = False

    @property
    def is_half_full(self) -> bool:
        return self._size > self._limit // SEGMENTS // 2

    @property
    def can_retry(self) -> bool:
        return self._failed_at is None or self._now() - self._failed_at > self._pause

    @property
    def wants_state(self) -> bool:
        """Whether the next file should begin."""
        if self._failed_at is not None:
            if self.can_retry:
                self._failed_at = self._now()  # not again before the next pause is over
                return True
            return False
        return self._size > self._limit // SEGMENTS

    def begin(self, state: bytes, position: int) -> None:
        """Begin the next file with a state that was taken at this position of the stream."""
        chunk = state_chunk(state, position)
        if len(chunk) > self._limit // 2:
            return self._fail_for_size(len(chunk), position)
        if self._failed_at is None:
            self._has_complained = False  # the last file was written without an error
        self.close()
        self._count += 1
        self._path = self._folder / f"{self._name}-{self._count:06d}{SEGMENT}"
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            return self._fail(f"{self._path} cannot be written: {error.strerror}")
        if self._write(chunk):
            self._failed_at, self._pause = None, RETRY_SECONDS

    def append(self, chunk: bytes) -> None:
        if self._file >= 0:
            self._write(chunk)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            if self._size:
                self._files.append((self._path, self._size))
            else:  # the disk is full
                self._path.unlink(missing_ok=True)
        self._file, self._size = -1, 0

    def complain(self, why: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.warning("the flight recorder pauses: %s; serving goes on without it", why)

    def _write(self, chunk: bytes) -> bool:
        """Write all of it, or nothing: a partial write is truncated."""
        try:
            written = 0
            while written < len(chunk):
                written += os.write(self._file, memoryview(chunk)[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            self._fail(f"{self._path} cannot be written: {error.strerror}")
            return False
        self._size += len(chunk)
        while self._files and self._size + sum(size for _, size in self._files) > self._limit:
            with contextlib.suppress(OSError):
                self._files[0][0].unlink()
            del self._files[0]
        return True

    def _fail_for_size(self, num_bytes: int, position: int) -> None:
        """The state is too large at the moment. It will shrink at an unknown time, so the pause before the next try doubles."""
        why = f"the engine's state takes {num_bytes} bytes, more than half of --record-bytes"
        pause = min(2 * self._pause, MOST_RETRY_SECONDS)
        self.append(gap_chunk(why, position))
        self._fail(why, pause)

    def _fail(self, why: str, pause: float = RETRY_SECONDS) -> None:
        self.complain(why)
        self._pause = pause
        self._failed_at = self._now()
        self.close()
