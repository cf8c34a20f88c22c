"""EngineClient: how anything asynchronous reaches an engine: over ZMQ in its own process, or on a thread of this one.
Knows nothing of HTTP or text."""

import asyncio
import contextlib
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

import msgspec
import zmq
import zmq.asyncio

from octavo.engine.build import Engine
from octavo.engine.driver import Driver, Inbox
from octavo.engine.streams import Streams
from octavo.errors import EngineDead, EngineUnavailable
from octavo.messages import (
    Abort,
    Control,
    Dying,
    EngineReport,
    FinishReason,
    FromEngine,
    GenerateRequest,
    Hello,
    Reply,
    StepDeltas,
    ToEngine,
    TokenDelta,
)


class EngineClient(ABC):
    """Five verbs: submit, abort, deltas, control, close. Used from one event loop."""

    def __init__(self, origin: int = 0) -> None:
        self.report: EngineReport | None = None  # None until the engine is ready
        self._origin = origin
        self._streams = Streams()
        self._is_ready = asyncio.Event()
        self._failure: EngineDead | None = None
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._call_ids = itertools.count(1)

    async def ready(self) -> EngineReport:
        """Wait for the engine. Raises EngineDead if it ends before."""
        await self._is_ready.wait()
        if self.report is None:
            assert self._failure is not None
            raise self._failure
        return self.report

    def submit(self, request: GenerateRequest) -> None:
        """Raises EngineUnavailable or EngineDead; otherwise its deltas will come."""
        if self._failure is not None:
            raise self._failure
        if self.report is None:
            raise EngineUnavailable("the engine is still starting", retry_after=2)
        self._streams.open(request.id, request.params.n)
        self._send(msgspec.structs.replace(request, origin=self._origin))

    def abort(self, request_id: str, index: int = -1, reason: FinishReason = "abort") -> None:
        """No more deltas of this choice (−1: of any choice) are wanted; its row and pages are freed before the next step."""
        self._streams.end_choice(request_id, index)
        self._send(Abort(request_id, index, reason))

    async def deltas(self, request_id: str) -> AsyncGenerator[list[TokenDelta], None]:
        """To be read once, right after submit, until every choice has ended. Leaving early aborts the request."""
        try:
            while deltas := await self._streams.next(request_id):
                yield deltas
        finally:
            if self._streams.close(request_id):
                self._send(Abort(request_id))

    async def control(self, control: Control) -> str:
        if self._failure is not None:
            raise self._failure
        call = next(self._call_ids)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._send(msgspec.structs.replace(control, call=call, origin=self._origin))
            return await future
        finally:
            del self._calls[call]

    @abstractmethod
    def close(self) -> None:
        """Open requests are abandoned."""

    @abstractmethod
    def _send(self, message: ToEngine) -> None: ...

    def _receive(self, message: FromEngine) -> None:
        match message:
            case StepDeltas():
                self._streams.deliver(message.deltas)
            case Reply():
                future = self._calls.get(message.call)
                if future is not None and not future.done():
                    future.set_result(message.body)
            case EngineReport():
                self.report = message
                self._is_ready.set()
            case Dying():
                self._fail(EngineDead(message.message))

    def _fail(self, error: EngineDead) -> None:
        self._failure, self.report = error, None
        self._is_ready.set()
        self._streams.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)


class ZmqClient(EngineClient):
    """To the engine process. `engine_address` is where that listens, `reply_address` where this one will."""

    def __init__(self, engine_address: str, reply_address: str, origin: int = 0) -> None:
        super().__init__(origin)
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._to_engine.set_hwm(0)  # bounded by the requests that the server has accepted
        self._to_engine.connect(engine_address)
        self._from_engine = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        self._from_engine.set_hwm(0)
        self._from_engine.bind(reply_address)
        self._hello = Hello(origin, reply_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._reader: asyncio.Task[None] | None = None

    async def ready(self) -> EngineReport:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read())
            self._reader.add_done_callback(self._reader_ended)
            self._send(self._hello)
        return await super().ready()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        self._from_engine.close(linger=0)
        self._to_engine.close(linger=200)
        self._context.term()

    def _send(self, message: ToEngine) -> None:
        self._to_engine.send(self._encoder.encode(message))

    def _reader_ended(self, reader: asyncio.Task[None]) -> None:
        """Nobody listens to the engine any more: say so, rather than let every request wait."""
        if not reader.cancelled() and (error := reader.exception()) is not None:
            self._fail(EngineDead(f"the engine cannot be understood: {type(error).__name__}: {error}"))

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while True:
            self._receive(decoder.decode(await self._from_engine.recv()))


class InProcessClient(EngineClient):
    """To an engine on a thread of this process. Must be made on the event loop that will use it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._event_loop = asyncio.get_running_loop()
        self._inbox: Inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drive, name="octavo-engine", daemon=True)
        self._receive(engine.report)
        self._thread.start()

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        self._engine.loop.close()

    def _send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def _drive(self) -> None:
        # A failure has reached every client as Dying before it gets here.
        with contextlib.suppress(Exception):
            Driver(self._engine, self._inbox, self).run()

    # The outbox of its own driver.

    def connect(self, hello: Hello) -> None:
        raise AssertionError("nobody introduces itself within one process")

    def send(self, origin: int, message: FromEngine) -> None:
        self._event_loop.call_soon_threadsafe(self._receive, message)

    def send_all(self, message: FromEngine) -> None:
        self.send(0, message)
