"""Journeys of this API process's HTTP requests. Completed ones go to the log and to the engine process, where every API process
can query them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
from starlette.types import Message, Send

from octavo.client.client import EngineClient, EngineObserver
from octavo.messages import Answered, GenerateRequest
from octavo.observe.journeys.journey import ENTRY_BYTES, Journey, OpenJourney, current
from octavo.observe.journeys.stages import EngineJourney, stage_seconds
from octavo.server.state.encoded_json import add_member

log = logging.getLogger("octavo.server")

PATIENCE_SECONDS = 10.0
"""How long to wait for the engine's part of an aborted request's journey: it is sent after the current step."""

_encode = msgspec.json.Encoder().encode
EVENT = b"event: octavo.journey\ndata: %s\n\n"


class Told:
    """Journeys that were sent to the engine process, bounded in bytes, to be sent again to the next engine."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: deque[Answered] = deque()

    def keep(self, answered: Answered) -> None:
        self._kept.append(msgspec.structs.replace(answered, is_old=True))
        self._num_bytes += len(answered.journey) + ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popleft().journey) + ENTRY_BYTES

    def __iter__(self) -> Iterator[Answered]:
        """Oldest first."""
        return iter(self._kept)


class Journeys(EngineObserver):
    def __init__(
        self, engine: EngineClient, api_process: int = 0, keeps_prompts: bool = False, max_bytes: int = 0
    ) -> None:
        """`max_bytes`: of journeys kept here too, for the next engine."""
        self._engine = engine
        self._api_process = api_process
        self._keeps_prompts = keeps_prompts
        self._open: dict[str, OpenJourney] = {}  # by HTTP request id; of two with the same id the later
        self._by_request: dict[str, OpenJourney] = {}  # by GenerateRequest id
        self._decoder = msgspec.msgpack.Decoder(EngineJourney)
        self._waiting: dict[OpenJourney, asyncio.Event] = {}  # waiting for the engine's part
        self._over: dict[
            OpenJourney, asyncio.TimerHandle
        ] = {}  # reported when the engine's part arrives, or by this timer
        self._left: set[OpenJourney] = set()  # the connection has ended, the generation has not
        self.on_told: list[Callable[[Journey, OpenJourney], None]] = []
        self._told = Told(max_bytes)
        engine.observer = self

    def begin(self, id: str, method: str, path: str, received: float) -> OpenJourney:
        journey = OpenJourney(id, method, path, self._api_process, received)
        self._open[id] = journey
        return journey

    def end(self, journey: OpenJourney) -> None:
        """The last byte is sent, or the client has disconnected. The journey is reported when the engine's part has arrived; that
        of a resumable stream not before the stream is complete."""
        if journey.making == "going on":
            self._left.add(journey)
        elif journey.is_told:
            self._tell(journey)
        else:
            self._over[journey] = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._tell, journey)

    def made(self, journey: OpenJourney, failure: Exception | None, *, is_given_up: bool) -> None:
        """A resumable stream has ended."""
        journey.making = "given up" if is_given_up else "to its end"
        if failure is not None and not is_given_up:
            journey.note(failure)
        if journey in self._left:
            self._left.discard(journey)
            self.end(journey)

    async def engine_part(self, journey: OpenJourney, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait for the engine's part, at most for so long."""
        if journey.is_told:
            return
        event = self._waiting.setdefault(journey, asyncio.Event())
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass  # reported without it
        finally:
            self._waiting.pop(journey, None)

    def find(self, id: str) -> OpenJourney | None:
        """An open journey, by the HTTP request's id or its response's."""
        return self._open.get(id) or self._by_request.get(id)

    def still_here(self) -> list[OpenJourney]:
        """Journeys of POST requests that were not submitted yet: the engine knows the others."""
        return [journey for journey in self._open.values() if not journey.requests and journey.method == "POST"]

    def _tell(self, journey: OpenJourney) -> None:
        if (timer := self._over.pop(journey, None)) is not None:
            timer.cancel()
        if self._open.get(journey.id) is journey:
            del self._open[journey.id]
        for id in journey.requests:
            self._by_request.pop(id, None)
        told = journey.tell()
        answered = Answered(
            [journey.id, *journey.requests],
            journey.method,
            journey.handler,
            told.status,
            told.seconds,
            _encode(told) if journey.method == "POST" else b"",
            stage_seconds(told.stages)
            if journey.requests or (journey.method == "POST" and journey.status >= 400)
            else {},
            told.prompt_tokens,
            told.output_tokens,
            told.preemptions,
            journey.ended,
        )
        self._engine.answered(answered)
        if answered.journey:
            self._told.keep(answered)
        for hear in self.on_told:
            hear(told, journey)

    def lost(self) -> None:
        for journey in {*self._by_request.values()}:
            journey.lose_engine()

    def found(self) -> None:
        for journey in {*self._by_request.values()}:
            journey.find_engine()
        for answered in self._told:
            self._engine.answered(answered)

    def submit(self, request: GenerateRequest) -> None:
        """Give a request to the engine, with the name and the time of its HTTP request."""
        journey = current.get()
        if journey is None:
            self._engine.submit(request)
            return
        now = time.monotonic()
        self._engine.submit(msgspec.structs.replace(request, http_id=journey.id, arrived=journey.received))
        journey.submit(request, now)
        if self._keeps_prompts:
            journey.prompts.append(request.prompt_ids)
        self._by_request[request.id] = journey

    def travelled(self, journey_part: bytes) -> None:
        travelled = self._decoder.decode(journey_part)
        journey = self._by_request.get(travelled.id)
        if journey is not None:
            journey.travelled[travelled.id] = travelled
            if not journey.is_told:
                return
            if (event := self._waiting.get(journey)) is not None:
                event.set()
            if journey in self._over:
                self._tell(journey)


class JourneySender:
    """Sends a response whose client asked for its journey: as the member `journey` of a whole answer, or as the last event of a
    stream. It covers everything but the sending of these bytes."""

    def __init__(self, journeys: Journeys, journey: OpenJourney, send: Send) -> None:
        self._journeys, self._journey, self._send = journeys, journey, send
        self._head: Message | None = None  # held until the body's length is known
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {bytes(name).lower(): bytes(value) for name, value in message["headers"]}
            kind = headers.get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            if kind == b"application/json" and b"content-length" in headers and message["status"] < 400:
                self._head = message
                return
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            if self._head is not None:
                message = await self._with_member(self._head, message)
            elif self._is_stream:
                message = {**message, "body": message.get("body", b"") + EVENT % await self._told()}
        await self._send(message)

    async def _with_member(self, head: Message, message: Message) -> Message:
        body: bytes = message.get("body", b"")
        if body.endswith(b"}") and body != b"{}":
            body = add_member(body, "journey", await self._told())
        length = str(len(body)).encode()
        headers = [
            (name, length if bytes(name).lower() == b"content-length" else value) for name, value in head["headers"]
        ]
        await self._send({**head, "headers": headers})
        return {**message, "body": body}

    async def _told(self) -> bytes:
        await self._journeys.engine_part(self._journey)
        self._journey.ended = time.monotonic()
        return _encode(self._journey.tell())
