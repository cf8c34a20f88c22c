"""GET /v1/stream/{id}?from=N: the events of a stream from number N on, for a client whose connection was lost.
Knows nothing of what the events say."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request, Response

from octavo.errors import InvalidRequest
from octavo.server.service import Service
from octavo.server.sse import EventStream, owner_of

MAX_NUMBER_LEN = 15  # digits: no stream has that many events


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/stream/{stream_id}")
    async def resume(request: Request, stream_id: str) -> Response:
        start = first_wanted(request)
        return EventStream(service, await find(service, stream_id, owner_of(request), start))

    return router


async def find(service: Service, stream_id: str, owner: bytes, start: int) -> AsyncGenerator[bytes, None]:
    log = service.logs.find(stream_id, owner)
    if log is not None:
        log.check(start)
        return log.read(start)
    events = None if service.siblings is None else await service.siblings.find(stream_id, owner, start)
    if events is None:
        raise service.logs.missing()
    return events


def first_wanted(request: Request) -> int:
    """By ?from=N, the first event that is wanted, or as browsers say it, by the last that came. Without either: all."""
    number = request.query_params.get("from")
    last = request.headers.get("last-event-id")
    for name, value in (("from", number), ("Last-Event-ID", last)):
        if value is not None and not (value.isascii() and value.isdigit() and len(value) <= MAX_NUMBER_LEN):
            raise InvalidRequest(f"{name} must be the number of an event, got {value[:60]!r}", param=name)
    if number is not None:
        return int(number)
    return 0 if last is None else int(last) + 1
