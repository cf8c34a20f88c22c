"""GET /v1/live: the server's state, a few times a second, as server-sent events; GET /v1/live/history: what it did
before; GET /v1/live/hint: what other limits would have done; GET /v1/live/pages/{page}: a page's owners. A key sees its
own requests among them; totals are for all."""

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.errors import EngineUnavailable, InvalidRequest, NotFound, Overloaded
from octavo.messages import ReadHistory, ReadPage
from octavo.observe.history import MAX_SECONDS
from octavo.observe.live_state import LiveHistory
from octavo.server.http.sse import EventStream, viewer_of
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.state.live_feed import MAX_WATCHERS
from octavo.server.state.service import Service


class LiveHint(msgspec.Struct, frozen=True):
    """As plan.advise.Hint has it."""

    text: str
    seconds: float
    num_requests: int
    outcomes: list[dict[str, str | float]]  # by flag and value; the first: as it is


class PageOwners(msgspec.Struct, frozen=True):
    page: int
    owners: list[str]  # HTTP requests


SHAPES = {
    "GET /v1/live": Shape(media=EVENTS),
    "GET /v1/live/history": Shape(LiveHistory),
    "GET /v1/live/hint": Shape(LiveHint),
    "GET /v1/live/pages/{page}": Shape(PageOwners),
}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/live")
    async def live(request: Request) -> Response:
        service.accept()
        if service.engine.is_recovering:
            raise EngineUnavailable("the engine has ended and is being restarted", retry_after=2)
        if service.live.is_full:
            raise Overloaded(f"{MAX_WATCHERS} clients are already watching, which is the limit", retry_after=10)
        return EventStream(service, service.live.watch(viewer_of(service, request).only))

    @router.get("/v1/live/history")
    async def history(request: Request) -> Response:
        found = await service.query(ReadHistory(call=0, seconds=_seconds(request)))
        return Response(found, media_type="application/json")

    @router.get("/v1/live/hint")
    async def hint() -> Response:
        return Response(await service.hints.get(), media_type="application/json")

    @router.get("/v1/live/pages/{page}")
    async def page_owners(page: str, request: Request) -> Response:
        num_pages = service.report.num_pages
        if not (page.isascii() and page.isdigit() and len(page) < 12 and int(page) < num_pages):
            raise NotFound(f"page {page[:60]!r} does not exist: pages go from 0 to {num_pages - 1}", param="page")
        owners = await service.query(ReadPage(call=0, page=int(page), owner=viewer_of(service, request).only))
        body = PageOwners(int(page), msgspec.json.decode(owners, type=list[str]))
        return Response(msgspec.json.encode(body), media_type="application/json")

    return router


def _seconds(request: Request) -> int:
    for name in request.query_params:
        if name != "seconds":
            raise InvalidRequest(f"unknown parameter {name[:60]!r}; supported is seconds", param=name[:60])
    given = request.query_params.get("seconds", "300")
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= MAX_SECONDS):
        raise InvalidRequest(f"seconds must be between 1 and {MAX_SECONDS}, got {given[:60]!r}", param="seconds")
    return int(given)
