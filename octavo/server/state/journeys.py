"""Journeys of this API process's HTTP requests. Completed ones go to the log and to the engine process, where every API process
can query them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator

import msgspec
from starlette.types import Message, Send

from octavo.client.client import EngineClient, EngineObserver, Placement
from octavo.messages import GenerateRequest, Responded
from octavo.observe.journeys.journey import ENTRY_BYTES, Journey, OpenJourney, current
from octavo.observe.journeys.stages import EngineJourney
from octavo.server.state.encoded_json import add_member
from octavo.server.state.owners import EVERYTHING, Viewer

log = logging.getLogger("octavo.server")

PATIENCE_SECONDS = 10.0
"""How long to wait for the engine's part of an aborted request's journey: it is sent after the current step."""

SPELLED_TOKENS = 8  # of a prompt, from where it differs on

_encode = msgspec.json.Encoder().encode
EVENT = b"event: octavo.journey\ndata: %s\n\n"


class SentJourneys:
    """Journeys that were sent to the engine process, bounded in bytes, to be sent again to the next engine."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: deque[Responded] = deque()

    def keep(self, responded: Responded) -> None:
        self._kept.append(msgspec.structs.replace(responded, is_old=True))
        self._num_bytes += len(responded.journey) + ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popleft().journey) + ENTRY_BYTES

    def __iter__(self) -> Iterator[Responded]:
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
        # By HTTP request id, which clients may choose; of two with the same id the later is found first.
        self._open: dict[str, list[OpenJourney]] = {}
        self._by_request: dict[str, OpenJourney] = {}  # by GenerateRequest id
        self._decoder = msgspec.msgpack.Decoder(EngineJourney)
        self._waiting: dict[OpenJourney, asyncio.Event] = {}  # waiting for the engine's part
        self._over: dict[
            OpenJourney, asyncio.TimerHandle
        ] = {}  # reported when the engine's part arrives, or by this timer
        self._left: set[OpenJourney] = set()  # the connection has ended, the generation has not
        self.on_report: list[Callable[[Journey, OpenJourney], None]] = []
        self._sent = SentJourneys(max_bytes)
        self.spell: Callable[[list[int]], str] | None = None  # text of token ids; None: no tokenizer
        self._prompts: dict[str, list[int]] = {}  # of open requests, by id
        engine.observer = self

    def begin(self, id: str, method: str, path: str, received: float) -> OpenJourney:
        journey = OpenJourney(id, method, path, self._api_process, received)
        self._open.setdefault(id, []).append(journey)
        return journey

    def end(self, journey: OpenJourney) -> None:
        """The last byte is sent, or the client has disconnected. The journey is reported when the engine's part has arrived; that
        of a resumable stream not before the stream is complete."""
        if journey.making == "going on":
            self._left.add(journey)
        elif journey.has_engine_part:
            self._report(journey)
        else:
            self._over[journey] = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._report, journey)

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
        if journey.has_engine_part:
            return
        event = self._waiting.setdefault(journey, asyncio.Event())
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            pass  # reported without it
        finally:
            self._waiting.pop(journey, None)

    def find(self, id: str, viewer: Viewer = EVERYTHING) -> OpenJourney | None:
        """An open journey, by the HTTP request's id or its response's. None: there is none that the key may see."""
        found = reversed(self._open.get(id, ()))
        journeys = (*found, *filter(None, [self._by_request.get(id)]))
        return next((journey for journey in journeys if viewer.may_see(journey.owner)), None)

    def still_here(self, viewer: Viewer = EVERYTHING) -> list[OpenJourney]:
        """Journeys of POST requests that were not submitted yet: the engine knows the others."""
        return [
            journey
            for journeys in self._open.values()
            for journey in journeys
            if not journey.requests and journey.method == "POST" and viewer.may_see(journey.owner)
        ]

    def _report(self, journey: OpenJourney) -> None:
        if (timer := self._over.pop(journey, None)) is not None:
            timer.cancel()
        if journey in (same := self._open.get(journey.id, [])):
            same.remove(journey)
            if not same:
                del self._open[journey.id]
        for id in journey.requests:
            self._by_request.pop(id, None)
            self._prompts.pop(id, None)
        final = journey.as_journey()
        responded = Responded(
            [journey.id, *journey.requests],
            journey.method,
            journey.handler,
            final.status,
            final.seconds,
            _encode(final) if journey.method == "POST" else b"",
            final.stage_seconds() if journey.requests or (journey.method == "POST" and journey.status >= 400) else {},
            final.prompt_tokens,
            final.output_tokens,
            final.preemptions,
            journey.ended,
            owner=journey.owner,
            jobs=journey.jobs,
            cached_tokens=final.cached_tokens,
            cache_miss=final.cache_miss,
            differs_at=next((stage.differs_at for stage in final.stages if stage.name == "prefill"), None),
        )
        self._engine.responded(responded)
        if responded.journey:
            self._sent.keep(responded)
        for hear in self.on_report:
            hear(final, journey)

    def lost(self, request_ids: Collection[str] | None = None) -> None:
        names = self._by_request if request_ids is None else request_ids
        for journey in {self._by_request[name] for name in names if name in self._by_request}:
            journey.lose_engine()

    def moved(self, request_id: str, placement: Placement) -> None:
        journey = self._by_request.get(request_id)
        if journey is not None:
            journey.place(request_id, msgspec.to_builtins(placement))
            journey.lose_engine()
            journey.find_engine()

    def found(self) -> None:
        for journey in {*self._by_request.values()}:
            journey.find_engine()
        for responded in self._sent:
            self._engine.responded(responded)

    def submit(self, request: GenerateRequest) -> None:
        """Give a request to the engine, with the name and the time of its HTTP request."""
        journey = current.get()
        if journey is None:
            self._engine.submit(request)
            return
        now = time.monotonic()
        received = msgspec.structs.replace(
            request, http_id=journey.id, owner=journey.owner, arrived=journey.received, adapter=journey.adapter
        )
        self._engine.submit(received)
        journey.submit(request, now)
        if (placement := self._engine.placement(request.id)) is not None:
            journey.place(request.id, msgspec.to_builtins(placement))
        if self._keeps_prompts:
            journey.prompts.append(request.prompt_ids)
        self._by_request[request.id] = journey
        self._prompts[request.id] = request.prompt_ids

    def travelled(self, journey_part: bytes) -> None:
        travelled = self._decoder.decode(journey_part)
        journey = self._by_request.get(travelled.id)
        if journey is not None:
            journey.travelled[travelled.id] = self._spelled(travelled)
            if not journey.has_engine_part:
                return
            if (event := self._waiting.get(journey)) is not None:
                event.set()
            if journey in self._over:
                self._report(journey)

    def _spelled(self, part: EngineJourney) -> EngineJourney:
        """With the words at which a prompt begins to differ from earlier ones."""
        spell, prompt = self.spell, self._prompts.get(part.id)
        if spell is None or prompt is None or all(stage.differs_at is None for stage in part.tracks[0].stages):
            return part
        first = part.tracks[0]
        stages = [
            stage
            if stage.differs_at is None
            else msgspec.structs.replace(
                stage, differs_text=spell(prompt[stage.differs_at : stage.differs_at + SPELLED_TOKENS])
            )
            for stage in first.stages
        ]
        return msgspec.structs.replace(part, tracks=[msgspec.structs.replace(first, stages=stages), *part.tracks[1:]])


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
                message = {**message, "body": message.get("body", b"") + EVENT % await self._journey_json()}
        await self._send(message)

    async def _with_member(self, head: Message, message: Message) -> Message:
        body: bytes = message.get("body", b"")
        if body.endswith(b"}") and body != b"{}":
            body = add_member(body, "journey", await self._journey_json())
        length = str(len(body)).encode()
        headers = [
            (name, length if bytes(name).lower() == b"content-length" else value) for name, value in head["headers"]
        ]
        await self._send({**head, "headers": headers})
        return {**message, "body": body}

    async def _journey_json(self) -> bytes:
        await self._journeys.engine_part(self._journey)
        self._journey.ended = time.monotonic()
        return _encode(self._journey.as_journey())
