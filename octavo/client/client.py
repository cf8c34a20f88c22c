"""EngineClient: the asyncio interface to an engine. ZmqClient reaches an engine process over ZMQ; engine/in_process_client.py has
the client of an engine on a thread."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection

import msgspec
import zmq
import zmq.asyncio

from octavo.client.inflight_limit import InflightLimit
from octavo.client.link import EngineLink, listen
from octavo.client.streams import Streams
from octavo.errors import EngineDead, EngineError, EngineUnavailable, Unsupported
from octavo.ipc.heartbeat import Heartbeat
from octavo.ipc.usage_ledger import Account, Charge
from octavo.messages import (
    Abort,
    Control,
    Dying,
    EngineGone,
    EngineLost,
    EngineReport,
    EngineStarted,
    Finish,
    FinishReason,
    FleetChanged,
    FleetState,
    FromEngine,
    FromSupervisor,
    GenerateRequest,
    Hello,
    LeaveQueue,
    PageEvents,
    PageSnapshot,
    ReplicaDrains,
    Reply,
    Responded,
    ScaleFleet,
    StepDeltas,
    ToEngine,
    TokenDelta,
    Travelled,
)

log = logging.getLogger("octavo.engine")

LAST_TOKENS_SECONDS = 0.05


class Placement(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Which replica of a fleet has a request, and why."""

    replica: int
    reason: str  # octavo.routing.policy.Reason
    expected_tokens: int = 0  # of its prompt, in the replica's prefix cache
    waiting_seconds: float = 0.0  # of work that was there before it
    moved: str = ""  # why it left the replica before; empty: this is its first


class EngineObserver:
    """Is called about the engine, beside the deltas of requests. The methods do nothing here."""

    def travelled(self, journey_part: bytes) -> None:
        """A request has ended in the engine. `journey_part`: an encoded EngineJourney; it comes before the last tokens."""

    def lost(self, request_ids: Collection[str] | None = None) -> None:
        """The engine has ended. Its requests (None: all) continue in the next one."""

    def found(self) -> None:
        """Another engine has taken over."""

    def moved(self, request_id: str, placement: Placement) -> None:
        """A request of a replica that has ended or drains goes on at another."""


class EngineClient(ABC):
    """Submits requests to an engine, streams their deltas and sends control calls. Used from one event loop."""

    def __init__(self, origin: int = 0) -> None:
        self.report: EngineReport | None = None  # None until the engine is ready
        self.heartbeat: Heartbeat | None = None  # None: not shared; only control calls tell how the engine is doing
        self.is_recovering = False  # the engine has ended and another starts: requests are accepted and wait for it
        self.num_restarts = 0
        self.fleet: FleetState | None = None  # None: there is one engine
        self.can_be_replaced = False  # whether another engine takes over when this one ends
        self.origin = origin
        self.observer = EngineObserver()
        self._streams = Streams()
        self._streams.on_budget_end = lambda request_id, index: self._send(Abort(request_id, index, "length"))
        self._inflight_limit: InflightLimit | None = None  # None: no limit
        self._is_ready = asyncio.Event()
        self._failure: EngineDead | None = None
        self._timers: dict[str, list[asyncio.TimerHandle]] = {}  # requests with a deadline or a queue timeout
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._call_ids = itertools.count(1)

    def count_usage(self, accounts: dict[bytes, Account]) -> None:
        """Count the tokens of requests by owner, from now on."""
        self._streams.accounts = accounts

    @property
    def num_open(self) -> int:
        """Requests of this process whose deltas are not read to the end."""
        return len(self._streams)

    @property
    def num_running(self) -> int:
        """Open requests that the engine has not finished yet."""
        return self._streams.num_growing

    def scale(self, wish: ScaleFleet) -> None:
        """Have the supervisor change the number of replicas, or start them again. Raises Unsupported where there is one engine."""
        raise Unsupported(
            "this server has one engine and no router: start it with --data-parallel-size, or with --max-replicas",
            param="replicas",
        )

    def heartbeats(self) -> list[Heartbeat]:
        """Of all engines that take requests, if they are shared."""
        return [] if self.heartbeat is None else [self.heartbeat]

    def placement(self, request_id: str) -> Placement | None:
        """The replica of an open request. None: there is one engine, or it waits for a replica."""
        return None

    async def ready(self) -> EngineReport:
        """Wait for the engine's report. Raises EngineDead if the engine ends first."""
        await self._is_ready.wait()
        if self.report is None:
            assert self._failure is not None
            raise self._failure
        return self.report

    def submit(self, request: GenerateRequest) -> None:
        """Send a request to the engine; `deltas` then yields its tokens, unless the request is released. Raises
        EngineUnavailable, EngineDead or Overloaded."""
        if self._failure is not None:
            raise self._failure
        if self.report is None:
            raise EngineUnavailable("the engine is still starting", retry_after=2)
        if self._inflight_limit is not None:
            rows = self.report.max_num_seqs
            self._inflight_limit.check(request, rows, self.is_recovering, self._streams.without_tokens)
        request = msgspec.structs.replace(request, origin=self.origin, submitted=time.monotonic())
        self._streams.open(request)
        if self._inflight_limit is not None:
            self._inflight_limit.hold(request)
        self._send(request)
        if request.deadline or request.queue_until:
            self._set_timers(request)

    def resume_charges(self, request_id: str, num_charged: int, num_known: int, note: Callable[[Charge], None]) -> None:
        """Right after submit, for a request that another process may have begun: see Streams.resume_charges."""
        self._streams.resume_charges(request_id, num_charged, num_known, note)

    def has(self, request_id: str) -> bool:
        """Whether the request is open here."""
        return request_id in self._streams

    def abort(self, request_id: str, index: int = -1, reason: FinishReason = "abort") -> None:
        """Stop one choice (−1: all choices). No more of its deltas are delivered; its row and pages are freed before the next
        step."""
        self._streams.end_choice(request_id, index)
        self._send(Abort(request_id, index, reason))

    async def deltas(self, request_id: str) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield the request's deltas as they arrive, until every choice has ended. To be iterated once, after submit.
        Leaving early aborts the request."""
        try:
            while deltas := await self._streams.next(request_id):
                yield deltas
        finally:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """Forget a request, and abort it if it has not ended. Does nothing where it was released before."""
        for timer in self._timers.pop(request_id, ()):
            timer.cancel()
        if self._inflight_limit is not None:
            self._inflight_limit.drop(request_id)
        if self._streams.close(request_id):
            self._send(Abort(request_id))

    async def control(self, control: Control) -> str:
        """Send a control call and return the engine's reply."""
        if self._failure is not None:
            raise self._failure
        if self.is_recovering:
            raise EngineUnavailable("the engine has ended and is being restarted", retry_after=2)
        call = next(self._call_ids)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._send(msgspec.structs.replace(control, call=call, origin=self.origin))
            return await future
        finally:
            del self._calls[call]

    def responded(self, responded: Responded) -> None:
        """Send the engine process a record to keep. While there is no engine this does nothing: send it again in `EngineObserver.found`."""
        if self.report is not None:
            self._send(responded)

    def _set_timers(self, request: GenerateRequest) -> None:
        """Start the request's timers in this process, so that they fire even while there is no engine."""
        loop = asyncio.get_running_loop()
        self._timers[request.id] = [
            loop.call_later(max(0.0, when - request.submitted), act, request)
            for when, act in ((request.deadline, self._expire), (request.queue_until, self._leave_queue))
            if when
        ]

    def _expire(self, request: GenerateRequest) -> None:
        message = "the request's deadline_ms has passed before it finished"
        if self._streams.end(request.id, Finish("error", message=message, cause="deadline")):
            self._send(Abort(request.id))

    def _leave_queue(self, request: GenerateRequest) -> None:
        if self._streams.has_begun(request.id):
            return
        if self.is_recovering:
            message = "the engine is being restarted, and the request's max_queue_ms has passed"
            self._streams.end(request.id, Finish("error", message=message, cause="overload", retry_after=2))
            self._send(Abort(request.id))
        else:
            self._send(LeaveQueue(request.id))

    @abstractmethod
    def close(self) -> None:
        """Disconnect. Open requests are abandoned."""

    @abstractmethod
    def _send(self, message: ToEngine) -> None: ...

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepDeltas():
                self._streams.deliver(message.deltas)
            case Travelled():
                self.observer.travelled(message.journey)
            case Reply():
                future = self._calls.get(message.call)
                if future is not None and not future.done():
                    future.set_result(message.body)
            case EngineReport():
                self.report = message
                self._is_ready.set()
            case Dying():
                self._fail(EngineDead(message.message))
            case PageEvents() | PageSnapshot():
                pass  # for routers

    def _fail(self, error: EngineDead) -> None:
        self._failure, self.report = error, None
        self._is_ready.set()
        self._streams.fail(error)
        self._fail_calls(error)

    def _fail_calls(self, error: EngineError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)


class ZmqClient(EngineClient):
    """The client of an engine process. `engine_address` is where the engine listens, `reply_address` where this client listens.

    With a supervisor (`supervisor_address`), open requests survive the end of an engine: they wait, and the next engine gets what it
    needs to continue them. Each engine has its own addresses, so messages to and from different engines never mix."""

    def __init__(
        self,
        engine_address: str,
        reply_address: str,
        origin: int = 0,
        supervisor_address: str = "",
        heartbeat: Heartbeat | None = None,
        inflight_limit: InflightLimit | None = None,
    ) -> None:
        super().__init__(origin)
        self.heartbeat = heartbeat
        self._inflight_limit = inflight_limit
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link: EngineLink | None = None  # None: not connected to an engine
        self._supervisor: zmq.asyncio.Socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._addresses = (engine_address, reply_address)
        self.can_be_replaced = bool(supervisor_address)
        if supervisor_address:
            self._supervisor = listen(zmq.asyncio.Context(self._context), supervisor_address)

    async def ready(self) -> EngineReport:
        if self._link is None:
            self._connect(*self._addresses)
            if self._supervisor is not None:
                self._listener = asyncio.create_task(self._follow_supervisor(self._supervisor))
                self._listener.add_done_callback(self._reader_ended)
        return await super().ready()

    def close(self) -> None:
        self._disconnect(linger=200)
        if self._listener is not None:
            self._listener.cancel()
        if self._supervisor is not None:
            self._supervisor.close(linger=0)
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        if self._link is not None:  # otherwise the Hello to the next engine covers it
            self._link.send(message)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Dying() if self._supervisor is not None:
                log.warning("%s", message.message)  # the supervisor decides whether another engine starts
            case EngineReport():
                was_lost, self.is_recovering = self.is_recovering, False
                super()._receive(message)
                if was_lost:
                    self.observer.found()
            case _:
                super()._receive(message)

    def _connect(self, engine_address: str, reply_address: str) -> None:
        """Connect to a new engine and send it a Hello with the open requests. Messages may be sent before it has loaded."""
        self._link = EngineLink(self._context, engine_address, reply_address, self._receive, self._reader_ended)
        newcomers = [] if self._inflight_limit is None else self._streams.untaken(self._inflight_limit.was_taken)
        survivors = self._streams.survivors({request.id for request in newcomers})
        self._send(Hello(self.origin, reply_address, survivors, newcomers))

    def _disconnect(self, linger: int = 0) -> None:
        """Drop the connection and the tokens still in it: the next engine computes the same tokens again."""
        if self._link is not None:
            self._link.close(linger)
        self._link = None

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        """Fail the open requests if a reader task has raised: nothing would arrive for them any more."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._fail(EngineDead(f"the connection to the engine has failed: {type(error).__name__}: {error}"))

    async def _follow_supervisor(self, socket: zmq.asyncio.Socket) -> None:
        decoder = msgspec.msgpack.Decoder(FromSupervisor)
        while True:
            await self._handle_notice(decoder.decode(await socket.recv()))

    async def _handle_notice(self, notice: FromSupervisor) -> None:
        match notice:
            case EngineLost():
                # The engine's last tokens may still be in the socket. Read them: they need not be computed again, and they
                # show which requests made progress.
                await asyncio.sleep(LAST_TOKENS_SECONDS)
                self._disconnect()
                self.is_recovering = True
                self.observer.lost()
                self._fail_calls(EngineUnavailable(f"{notice.message}; it is being restarted", retry_after=2))
                for name in self._streams.strike(notice.seated):
                    log.error("request %s is failed: it was alone in the engine each time the engine ended", name)
            case EngineStarted():
                self._disconnect()  # from an engine that had ended before this process started
                self.num_restarts += 1
                self._connect(notice.engine_address, notice.reply_address)
            case EngineGone():
                self._disconnect()
                self._fail(EngineDead(notice.message))
            case ReplicaDrains() | FleetChanged():
                pass  # there is one engine, and it is not drained without its server
