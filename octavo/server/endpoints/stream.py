"""GET /v1/stream/{id}?from=N: the events of a stream from number N on, for a client whose connection was lost. DELETE: end it, for a
client that wants no more of it; to close the connection is not enough, because the stream outlives it."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.errors import EngineUnavailable, InvalidRequest, OctavoError
from octavo.server.http.errors import error_event
from octavo.server.http.sse import EventStream, owner_of
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.state.loopback import FRESH, RECORD
from octavo.server.state.service import Service
from octavo.server.state.stream_records import MAX_ATTEMPTS, StreamRecord

logger = logging.getLogger("octavo.server")

TAKE_OVER_SECONDS = 5.0
MAX_NUMBER_LEN = 15  # digits: no stream has that many events
KIND, END_KIND = "streams", "ends of streams"  # of queries to other API processes


class Wanted(msgspec.Struct, frozen=True):
    stream_id: str
    owner: bytes
    start: int


class Ended(msgspec.Struct, frozen=True):
    id: str
    object: Literal["stream.deleted"] = "stream.deleted"
    deleted: Literal[True] = True


SHAPES = {
    "GET /v1/stream/{stream_id}": Shape(media=EVENTS),
    "DELETE /v1/stream/{stream_id}": Shape(Ended),
}


def router(service: Service) -> APIRouter:
    router = APIRouter()
    service.peers.handle(KIND, lambda body: find_here(service, msgspec.json.decode(body, type=Wanted)))

    @router.get("/v1/stream/{stream_id}")
    async def resume(request: Request, stream_id: str) -> Response:
        wanted = Wanted(stream_id, owner_of(request), first_wanted(request))
        return EventStream(service, await find(service, wanted))

    service.peers.handle(END_KIND, lambda body: end_here(service, msgspec.json.decode(body, type=Wanted)))

    @router.delete("/v1/stream/{stream_id}")
    async def end(request: Request, stream_id: str) -> Response:
        wanted = Wanted(stream_id, owner_of(request), 0)
        is_ended = service.logs.end(stream_id, wanted.owner)
        if not is_ended and await service.peers.ask_whole(END_KIND, msgspec.json.encode(wanted)) is None:
            record = service.records.claim(stream_id, lambda owner: service.owners.may_see(wanted.owner, owner))
            if record is None:
                raise service.logs.missing()
            record.remove()
        return Response(msgspec.json.encode(Ended(stream_id)), media_type="application/json")

    return router


def end_here(service: Service, wanted: Wanted) -> AsyncGenerator[bytes, None] | None:
    """For another process."""
    return _nothing() if service.logs.end(wanted.stream_id, wanted.owner) else None


async def _nothing() -> AsyncGenerator[bytes, None]:
    return
    yield b""


async def find(service: Service, wanted: Wanted) -> AsyncGenerator[bytes, None]:
    """The events of a stream that this process makes, or another one, or that one made which has ended: then this one goes on with it."""
    until = time.monotonic() + TAKE_OVER_SECONDS
    while True:
        log = service.logs.find(wanted.stream_id, wanted.owner)
        if log is not None:
            log.check(wanted.start)
            return log.read(wanted.start)
        events = await service.peers.ask(KIND, msgspec.json.encode(wanted))
        if events is not None:
            return events
        record = service.records.claim(wanted.stream_id, lambda owner: service.owners.may_see(wanted.owner, owner))
        if record is not None:
            await take_over(service, record, wanted.start)
        elif not service.records.has(wanted.stream_id) or time.monotonic() > until:
            raise service.logs.missing()
        else:
            await asyncio.sleep(0.05)  # its process is about to end, or another one is taking it over


async def take_over(service: Service, record: StreamRecord, start: int) -> None:
    """Make a stream again whose process has ended, as far as its tokens are known, and have the engine go on with it. Raises the error with which
    that is refused."""
    head = record.head
    assert service.ask is not None
    if head.fingerprint != service.fingerprint:
        record.release()
        logger.error("stream %s cannot be continued: its model, or how it is computed, was changed since", record.id)
        raise service.logs.missing()
    if record.num_attempts >= MAX_ATTEMPTS:
        logger.error(
            "stream %s is not continued: %d API processes have ended with it", record.id, 1 + record.num_attempts
        )
        record.remove()
        raise service.logs.missing()
    record.note_attempt()
    logger.warning("going on with stream %s, whose API process has ended", record.id)
    more = {FRESH: record.source(), RECORD: record}
    try:
        answer = await service.ask(head.path, head.body, head.owner, more)
    except BaseException:
        record.release()
        raise
    log = service.logs.find(record.id, head.owner)
    if log is None:  # refused, as a new request would be
        record.release()
        if answer.status in (429, 503):
            raise EngineUnavailable("the stream cannot be continued now: the server is busy", answer.retry_after or 2)
        logger.error("stream %s cannot be continued: %s", record.id, answer.body[:500].decode(errors="replace"))
        raise service.logs.missing()
    log.expect(start)
    while log.num_events < start and not record.is_made_again and not log.is_ended:  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def find_here(service: Service, wanted: Wanted) -> AsyncGenerator[bytes, None] | None:
    """For another process: an error that ended the stream is its last event."""
    log = service.logs.find(wanted.stream_id, wanted.owner)
    if log is None:
        return None
    log.check(wanted.start)
    return _with_end(log.read(wanted.start), wanted.stream_id)


async def _with_end(events: AsyncGenerator[bytes, None], stream_id: str) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for chunk in events:
                yield chunk
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("stream %s failed", stream_id)
            yield error_event(error, stream_id)


def first_wanted(request: Request) -> int:
    """The first event to send: ?from=N, or the one after Last-Event-ID, as browsers send it. Without either: all."""
    number = request.query_params.get("from")
    last = request.headers.get("last-event-id")
    for name, value in (("from", number), ("Last-Event-ID", last)):
        if value is not None and not (value.isascii() and value.isdigit() and len(value) <= MAX_NUMBER_LEN):
            raise InvalidRequest(f"{name} must be the number of an event, got {value[:60]!r}", param=name)
    if number is not None:
        return int(number)
    return 0 if last is None else int(last) + 1
