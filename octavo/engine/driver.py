"""Driver: runs an engine loop from an inbox. It sleeps while idle, handles messages between steps, and sends tokens to the API
processes that asked for them."""

import logging
import queue
import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from octavo.engine.build import Engine
from octavo.engine.recovery import Recovery
from octavo.errors import EngineUnavailable, Overloaded
from octavo.messages import (
    ASLEEP,
    AWAKE,
    Abort,
    Dying,
    Finish,
    FromEngine,
    GenerateRequest,
    Hello,
    HoldPrefix,
    LeaveQueue,
    LoadAdapter,
    Ping,
    ReadHistory,
    ReadJourneys,
    ReadLive,
    ReadMetrics,
    ReadPage,
    ReadPlace,
    ReadPrefixes,
    ReadProgress,
    ReadSleep,
    ReleasePrefix,
    Reply,
    ResetPrefixCache,
    Responded,
    ServerGone,
    SleepEngine,
    StepDeltas,
    ToEngine,
    TokenDelta,
    Travelled,
    WakeEngine,
    WantSnapshot,
)
from octavo.observe.journeys.stages import EngineJourney
from octavo.observe.replica_feed import ReplicaFeed

log = logging.getLogger("octavo.engine")


class Wake(NamedTuple):
    """Wakes a driver that sleeps over its inbox: there is work."""


Inbox = queue.SimpleQueue[ToEngine | Wake | None]
"""None: stop."""
_REST_SECONDS = 1.0  # how often an idle engine beats: silence means that it hangs

EVENT_SECONDS = 0.02
"""Between two messages to routers while steps go on. A router counts what it sends in the meantime itself."""


class Outbox(Protocol):
    def connect(self, hello: Hello) -> None:
        """An API process is there: messages can be sent to it from now on."""

    def send(self, origin: int, message: FromEngine) -> None: ...

    def send_all(self, message: FromEngine) -> None:
        """Send to every API process that has connected."""


class Driver:
    def __init__(self, engine: Engine, inbox: Inbox, outbox: Outbox, num_origins: int = 0) -> None:
        """`num_origins`: how many API processes must send their Hello before anything is computed."""
        self._loop, self._report, self._control = engine
        self._feed = engine.control.feed
        self._has_news = False  # for routers: something has happened since the last events
        self._published = 0.0  # when they were sent
        self._inbox, self._outbox = inbox, outbox
        self._origins: dict[str, int] = {}  # open request → API process
        self._listening: dict[int, str] = {}  # API process → where it listens
        self._sleepers: list[SleepEngine] = []  # calls that wait until the engine sleeps
        self._warming = ""  # the request that computes a pinned prefix again
        self._recovery: Recovery | None = Recovery(num_origins) if num_origins else None  # None: over
        self._encode = msgspec.msgpack.Encoder().encode
        self._loop.on_grammar_ready = lambda: inbox.put(Wake())
        self._loop.on_memory_moved = self._control.heartbeat.rest  # else the supervisor would take it for hanging
        if self._loop.tier is not None:
            self._loop.tier.on_event(lambda: inbox.put(Wake()))
        if self._loop.adapters is not None:
            self._loop.adapters.on_event(lambda: inbox.put(Wake()))
        self._control.journal.on_end = self._travelled

    def run(self) -> None:
        """Run until None arrives. An exception ends the engine: every API process is sent Dying, then it is raised."""
        loop, inbox = self._loop, self._inbox
        try:
            while self._take_in():
                if self._recovery is not None:
                    self._continue_requests(self._recovery)
                if self._recovery is None:
                    self._warm_pinned()
                while loop.has_work:
                    self._send(loop.step())
                    if self._feed is not None:
                        self._has_news = True
                        if time.monotonic() - self._published >= EVENT_SECONDS:
                            self._publish(self._feed)
                    if self._recovery is not None or not inbox.empty():
                        break
        except BaseException as error:
            self._outbox.send_all(Dying(f"the engine failed: {type(error).__name__}: {error}"))
            raise

    def _take_in(self) -> bool:
        """Handle all messages there are; wait for one if there is nothing else to do. False: stop."""
        is_idle = not self._loop.has_work
        if (
            self._sleepers
            and self._recovery is None
            and not self._warming
            and self._loop.may_sleep
            and self._inbox.empty()
        ):
            self._control.sleep()
            self._answer_sleepers(ASLEEP)
        if is_idle:
            self._control.heartbeat.rest()
            if self._has_news and self._feed is not None:
                self._publish(self._feed)
        try:
            message = self._inbox.get(is_idle, _REST_SECONDS)
        except queue.Empty:
            if is_idle:
                self._control.rest()
            return True
        self._has_news = self._feed is not None
        while message is not None:
            self._handle(message)
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return True
        return False

    def _handle(self, message: ToEngine | Wake) -> None:
        match message:
            case Wake():
                self._loop.take_tier_events()
            case GenerateRequest():
                if self._recovery is None:
                    self._add(message)
                else:
                    self._recovery.hold(message)
            case Abort():
                self._loop.abort(message)
                if self._recovery is not None:
                    self._recovery.drop(message)
                self._forget_if_done(message.request_id)
            case LeaveQueue():
                self._leave_queue(message.request_id)
            case Hello():
                self._lose(message.origin)  # a predecessor whose end was not reported yet
                self._listening[message.origin] = message.reply_to
                self._outbox.connect(message)
                self._outbox.send(message.origin, self._report)
                self._send_snapshot(message.origin)
                if self._recovery is not None:
                    self._recovery.hello(message)
            case WantSnapshot():
                self._send_snapshot(message.origin)
            case ServerGone():
                if self._listening.get(message.origin) == message.reply_to:  # else its successor is here already
                    self._lose(message.origin)
            case Responded():
                self._control.responded(message)
            case LoadAdapter():
                self._load_adapter(message)
            case SleepEngine():
                self._sleepers.append(message)
            case WakeEngine():
                self._outbox.send(message.origin, Reply(message.call, self._control.reply(message)))
                self._answer_sleepers(AWAKE)
            case (
                ReadMetrics()
                | ReadProgress()
                | ReadPlace()
                | Ping()
                | ResetPrefixCache()
                | ReadJourneys()
                | ReadLive()
                | ReadHistory()
                | ReadPage()
                | HoldPrefix()
                | ReleasePrefix()
                | ReadPrefixes()
                | ReadSleep()
            ):
                self._outbox.send(message.origin, Reply(message.call, self._control.reply(message)))

    def _answer_sleepers(self, state: str) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            self._outbox.send(sleeper.origin, Reply(sleeper.call, state))

    def _load_adapter(self, message: LoadAdapter) -> None:
        """Replies when it is in memory, or cannot be."""

        def reply(error: str) -> None:
            self._outbox.send(message.origin, Reply(message.call, error))

        if self._loop.adapters is None:
            reply("this engine serves no adapters (--enable-lora)")
        else:
            self._loop.adapters.load(message.adapter, reply)

    def _publish(self, feed: ReplicaFeed) -> None:
        """Send routers what has changed in the prefix cache, and the load."""
        events = feed.take()
        self._outbox.send_all(events)
        self._control.heartbeat.set_backlog(events.load.seconds)
        self._has_news, self._published = False, time.monotonic()

    def _send_snapshot(self, origin: int) -> None:
        if self._feed is not None:
            self._outbox.send(origin, self._feed.snapshot())

    def _lose(self, origin: int) -> None:
        """An API process has ended: abort its requests."""
        self._listening.pop(origin, None)
        if self._recovery is not None:
            self._recovery.lose(origin)
        for request_id in [request_id for request_id, its in self._origins.items() if its == origin]:
            self._loop.abort(Abort(request_id))
            self._forget_if_done(request_id)

    def _continue_requests(self, recovery: Recovery) -> None:
        while wave := recovery.next_wave():
            if any(request.begun for request in wave):
                log.warning("continuing %d requests after an engine restart", len(wave))
            for request in wave:
                self._add(request)
        if recovery.is_over:
            self._recovery = None

    def _warm_pinned(self) -> None:
        """Compute prefixes again that were pinned when the last engine died: one at a time, behind the requests that it left."""
        holds = self._loop.holds
        if holds is None or self._warming or not holds.to_warm:
            return
        request = holds.next_to_warm(self._report.max_model_len)
        if request is None:
            return
        self._warming = request.id
        self._origins[request.id] = request.origin
        self._loop.add(request)

    def _add(self, request: GenerateRequest) -> None:
        """A request that cannot be taken in fails alone, whatever is wrong with it."""
        self._origins[request.id] = request.origin
        self._control.heartbeat.take(request.origin, request.submitted)
        if self._feed is not None:
            self._feed.received(request.origin)
        self._control.heartbeat.prepare(0, request.id)
        try:
            self._control.check(request)
            self._check_room(request)
            self._loop.add(request)
        except Overloaded as error:
            self._refuse(request.id, range(request.params.n), _overload(error))
        except Exception as error:
            log.exception("request %s could not be queued", request.id)
            message = f"the engine could not queue this request: {type(error).__name__}: {error}"
            self._refuse(request.id, range(request.params.n), Finish("error", message=message))
        self._control.heartbeat.prepare(0, "")

    def _refuse(self, request_id: str, choices: Iterable[int], finish: Finish) -> None:
        deltas = [TokenDelta(request_id, index, [], finish) for index in choices]
        self._outbox.send(self._origins[request_id], StepDeltas(deltas))
        self._forget_if_done(request_id)

    def _leave_queue(self, request_id: str) -> None:
        if self._loop.adapters is not None and (held := self._loop.adapters.held(request_id)) is not None:
            self._loop.abort(Abort(request_id, reason="error"))
            self._refuse(request_id, range(held.params.n), _overload(self._control.overdue()))
            return
        choices = self._loop.scheduler.choices(request_id)
        if choices and all(choice.is_untouched for choice in choices):
            self._loop.abort(Abort(request_id, reason="error"))
            self._refuse(request_id, [choice.index for choice in choices], _overload(self._control.overdue()))

    def _check_room(self, request: GenerateRequest) -> None:
        """An engine measures its memory when it starts: there may be less than when the request was admitted."""
        assert request.params.max_tokens is not None, "resolved at admission"
        num_new = 0 if request.pooling is not None else request.params.max_tokens
        if len(request.prompt_ids) + num_new > self._report.max_model_len:
            raise EngineUnavailable(f"the restarted engine has room for only {self._report.max_model_len} tokens")

    def _send(self, deltas: list[TokenDelta]) -> None:
        """Send one message per step to each API process."""
        by_origin: dict[int, list[TokenDelta]] = {}
        for delta in deltas:
            by_origin.setdefault(self._origins[delta.request_id], []).append(delta)
        for origin, its_deltas in by_origin.items():
            self._outbox.send(origin, StepDeltas(its_deltas))
        if self._recovery is not None:
            self._recovery.note(deltas)
        for delta in deltas:  # after sending: several choices of one request may end in one step
            if delta.finish is not None:
                self._forget_if_done(delta.request_id)

    def _travelled(self, journey: EngineJourney) -> None:
        """Called as the request ends, before its last tokens are sent: the API process then has the journey when it finishes."""
        self._outbox.send(journey.origin, Travelled(self._encode(journey)))

    def _forget_if_done(self, request_id: str) -> None:
        if not self._loop.has(request_id):
            self._origins.pop(request_id, None)
            if request_id == self._warming and self._loop.holds is not None:
                self._warming = ""
                self._loop.holds.warmed()
                self._inbox.put(Wake())  # for the next one
            if self._recovery is not None:
                self._recovery.forget(request_id)


def _overload(error: Overloaded) -> Finish:
    return Finish("error", message=error.message, cause="overload", retry_after=error.retry_after or 1)
