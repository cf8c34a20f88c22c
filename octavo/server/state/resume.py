"""Resumable streams: their events are numbered and kept, so that a client that lost its connection can read on.

A log is filled by its own task, with or without a reader. The time without a reader and the bytes kept are bounded. The latest
connection is the reader: a client may reconnect before its old connection is noticed as lost."""

import asyncio
import logging
import operator
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from octavo.errors import EngineUnavailable, InvalidRequest, NotFound, OctavoError, Overloaded
from octavo.server.state.ignored_fields import name_back

logger = logging.getLogger("octavo.server")

MAX_STREAM_BYTES = 2**20  # of one stream: beyond them sent events are dropped, and unsent ones pause the generation


class StreamLog:
    """The numbered events of one stream. Used on one event loop."""

    def __init__(self, stream_id: str, owner: bytes, on_change: Callable[["StreamLog", int], None]) -> None:
        """`on_change`: called with the log and the bytes it grew by, whenever its size or its reader changes."""
        self.id, self.owner = stream_id, owner
        self.is_ended = False
        self.num_bytes = 0
        self.timer: asyncio.TimerHandle | None = None  # runs while there is no reader
        self.filling: asyncio.Task[None] | None = None
        self.on_drop: Callable[[], None] = lambda: None
        self._on_change = on_change
        self._events: deque[bytes] = deque()
        self._first = 0  # number of the oldest kept event
        self._num_sent = 0  # events below this were handed to a reader
        self.failure: Exception | None = None  # the error that ended it
        self._reader: object | None = None
        self._news = asyncio.Event()  # for the reader: more events, the end, or another reader
        self._room = asyncio.Event()  # for the filling task

    @property
    def has_reader(self) -> bool:
        return self._reader is not None

    @property
    def num_events(self) -> int:
        return self._first + len(self._events)

    async def fill(self, events: AsyncGenerator[bytes, None], ignored: Sequence[str]) -> None:
        """Append `events` until they end. Their error is raised to a reader that gets that far."""
        try:
            async with aclosing(events):
                async for chunk in events:
                    self._append(name_back(chunk, ignored))
                    ignored = ()
                    while self._forget() > MAX_STREAM_BYTES:
                        self._room.clear()
                        await self._room.wait()
        except asyncio.CancelledError:
            self.failure = EngineUnavailable("this stream was ended before it was complete")
            raise
        except Exception as error:
            if not isinstance(error, OctavoError):  # possibly no reader gets that far
                logger.exception("stream %s failed", self.id)
            self.failure = error
        finally:
            self.is_ended = True
            self._news.set()

    def check(self, start: int) -> None:
        """Raise InvalidRequest unless it can be read from event `start` on."""
        if start < self._first:
            raise InvalidRequest(
                f"event {start} is no longer kept: the first kept event is {self._first}", param="from"
            )
        if start > self.num_events:
            raise InvalidRequest(
                f"event {start} does not exist yet: the last event is {self.num_events - 1}", param="from"
            )

    def expect(self, start: int) -> None:
        """The next reader will read from event `start` on: those before it need not be kept for it."""
        self._num_sent = start
        self._room.set()

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """Events from `start` on, as they come. The next reader continues where this one leaves."""
        self.check(start)  # again: another reader may have advanced meanwhile, and sent events may be dropped
        self._reader = me = object()
        self._num_sent = at = start
        self._news.set()  # the previous reader is to leave
        self._on_change(self, 0)
        try:
            while self._reader is me:
                if at < self.num_events:
                    chunk = b"".join([self._events[late] for late in range(at - self.num_events, 0)])
                    self._num_sent = at = self.num_events
                    self._room.set()
                    yield chunk
                elif not self.is_ended:
                    self._news.clear()
                    await self._news.wait()
                elif self.failure is not None:
                    raise self.failure
                else:
                    break
        finally:
            if self._reader is me:
                self._reader = None
                self._on_change(self, 0)

    def _append(self, chunk: bytes) -> None:
        """A chunk is one or more events, each of which ends with an empty line."""
        *events, rest = chunk.split(b"\n\n")
        assert not rest, "events are whole"
        numbered = [b"id: %d\n%b\n\n" % (self.num_events + at, event) for at, event in enumerate(events)]
        self._events.extend(numbered)
        self._grew(sum(map(len, numbered)))
        self._news.set()

    def _forget(self) -> int:
        """Drop sent events, oldest first, while too many bytes are kept. → bytes kept."""
        while self.num_bytes > MAX_STREAM_BYTES and self._first < self._num_sent:
            self._first += 1
            self._grew(-len(self._events.popleft()))
        return self.num_bytes

    def _grew(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._on_change(self, num_bytes)


class StreamLogs:
    """The logs of one API process."""

    def __init__(self, seconds: float, max_bytes: int, may_see: Callable[[bytes, bytes], bool] = operator.eq) -> None:
        """A log without a reader is dropped after `seconds`, or earlier if all logs exceed `max_bytes`. `may_see`: whether an
        owner (the first) may see the stream of another."""
        self._seconds, self._max_bytes, self._may_see = seconds, max_bytes, may_see
        self._logs: dict[str, StreamLog] = {}
        self._num_bytes = 0

    def open(self, stream_id: str, owner: bytes) -> StreamLog:
        if not self._seconds:
            raise InvalidRequest(
                "this server does not keep streams (--resume-seconds 0)", param="stream_options.resumable"
            )
        self._make_room()
        if self._num_bytes > self._max_bytes:
            raise Overloaded(
                f"the streams that can be resumed hold {self._num_bytes} bytes, which is over the limit "
                f"(--resume-bytes {self._max_bytes}): try later, or without stream_options.resumable",
                retry_after=int(self._seconds) + 1,
            )
        log = self._logs[stream_id] = StreamLog(stream_id, owner, self._changed)
        self._changed(log, 0)
        return log

    def find(self, stream_id: str, owner: bytes) -> StreamLog | None:
        """None: there is none that `owner` may see."""
        log = self._logs.get(stream_id)
        return log if log is not None and self._may_see(owner, log.owner) else None

    def end(self, stream_id: str, owner: bytes) -> bool:
        """Drop a log and cancel the task that fills it. False: there is none."""
        log = self.find(stream_id, owner)
        if log is not None:
            self._drop(log)
        return log is not None

    def missing(self) -> NotFound:
        return NotFound(
            "no stream with this id can be resumed: it is unknown, or its request did not set stream_options.resumable, or "
            f"it was not read for {self._seconds:g} s (--resume-seconds), or it was dropped to make room (--resume-bytes)"
        )

    def _changed(self, log: StreamLog, num_bytes: int) -> None:
        if log.id not in self._logs:  # dropped: its task is being cancelled
            return
        self._num_bytes += num_bytes
        if log.has_reader:
            if log.timer is not None:
                log.timer.cancel()
                log.timer = None
            return
        if log.timer is None:
            log.timer = asyncio.get_running_loop().call_later(self._seconds, self._drop, log)
            # Ordered by when the reader left, the longest first.
            self._logs[log.id] = self._logs.pop(log.id)
        if num_bytes > 0:
            self._make_room()

    def _make_room(self) -> None:
        """Drop logs without a reader: complete ones first, then the longest unread."""
        if self._num_bytes <= self._max_bytes:
            return
        away = [log for log in self._logs.values() if not log.has_reader]
        for log in sorted(away, key=lambda log: not log.is_ended):
            if self._num_bytes > self._max_bytes:
                self._drop(log)

    def _drop(self, log: StreamLog) -> None:
        if self._logs.pop(log.id, None) is None:
            return
        self._num_bytes -= log.num_bytes
        if log.timer is not None:
            log.timer.cancel()
        log.on_drop()
        if log.filling is not None:
            log.filling.cancel()  # which aborts its request in the engine
