"""/v1/responses: create, stream, retrieve, delete; a response's input items; how many tokens an input has; compaction."""

import time
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from fastapi import APIRouter, Request
from fastapi import Response as HttpResponse

from octavo.errors import InvalidRequest, Unsupported
from octavo.server.dialects.openai_responses import request as requests
from octavo.server.dialects.openai_responses import types
from octavo.server.dialects.openai_responses.compact import (
    INSTRUCTION,
    Compacted,
    CompactRequest,
    CompactWriter,
)
from octavo.server.dialects.openai_responses.compact import NOT_OFFERED as COMPACT_NOT_OFFERED
from octavo.server.dialects.openai_responses.conversation import Conversation
from octavo.server.dialects.openai_responses.output import item_id
from octavo.server.dialects.openai_responses.request import INCLUDABLE, NAMES, InputRequest, ResponsesRequest
from octavo.server.dialects.openai_responses.store import KeptResponses, ResponseStore, StoredResponse, not_found
from octavo.server.dialects.openai_responses.writer import ResponseWriter
from octavo.server.endpoints.stream import MAX_NUMBER_LEN, Wanted
from octavo.server.endpoints.stream import find as find_stream
from octavo.server.generate.chat_task import ChatTask
from octavo.server.http.respond import submit_and_respond
from octavo.server.http.sse import EventStream, owner_of
from octavo.server.schema.fields import RouteSchema, StreamFields, read_fields
from octavo.server.schema.shapes import EVENTS, Shape
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.loopback import is_inside
from octavo.server.state.service import Service

ROUTE_SCHEMAS: list[RouteSchema[Any]] = [
    RouteSchema("responses", "/v1/responses", ResponsesRequest, requests.NOT_OFFERED),
    RouteSchema("responses input tokens", "/v1/responses/input_tokens", InputRequest, requests.NOT_OFFERED),
    RouteSchema("responses compact", "/v1/responses/compact", CompactRequest, COMPACT_NOT_OFFERED),
]
SHAPES = {
    "POST /v1/responses": Shape(
        types.Response,
        EVENTS,
        leads_to=(
            "GET /v1/responses/{response_id}",
            "DELETE /v1/responses/{response_id}",
            "GET /v1/responses/{response_id}/input_items",
        ),
    ),
    "POST /v1/responses/input_tokens": Shape(types.InputTokens),
    "POST /v1/responses/compact": Shape(Compacted),
    "GET /v1/responses/{response_id}": Shape(types.Response, EVENTS),
    "DELETE /v1/responses/{response_id}": Shape(types.Deleted),
    "POST /v1/responses/{response_id}/cancel": Shape(types.Response),
    "GET /v1/responses/{response_id}/input_items": Shape(types.ItemList),
}
MAX_ITEMS = 100  # per page of a response's input


def router(service: Service) -> APIRouter:
    router = APIRouter()
    server = service.config.server
    own = ResponseStore(server.max_stored_responses, int(server.max_stored_response_bytes), service.owners.may_see)
    being_made: WeakValueDictionary[str, ResponseWriter] = WeakValueDictionary()

    def cancel_here(response_id: str, owner: bytes) -> bytes | None:
        """Cancel a response whose stream is resumable. Others end when their client disconnects."""
        log, writer = service.logs.find(response_id, owner), being_made.get(response_id)
        if log is None or log.is_ended or writer is None:
            return None
        service.logs.end(response_id, owner)
        return msgspec.json.encode(writer.cancelled())

    kept = KeptResponses(own, service.peers, cancel_here, service.logs.end)

    async def prepare(conversation: Conversation, max_tokens: int | None, arrived: float) -> ChatTask:
        with NAMES.in_errors():
            return await ChatTask.prepare(
                service,
                conversation.fields,
                conversation.prompt,
                response_id=item_id("resp"),
                max_tokens=max_tokens,
                arrived=arrived,
            )

    @router.post("/v1/responses")
    async def create(request: Request) -> HttpResponse:
        arrived = time.monotonic()
        service.accept()
        fields: ResponsesRequest = await read_fields(request, ROUTE_SCHEMAS[0], service.config)
        await service.check_model(fields.model)
        owner = owner_of(request)
        conversation = await Conversation.read(service, kept, fields, owner)
        task = await prepare(conversation, fields.max_output_tokens, arrived)
        response_id, is_local = task.response_id, is_inside(request.scope)
        writer = ResponseWriter(service, own, fields, conversation, task, response_id, owner, is_local)
        being_made[response_id] = writer
        return await submit_and_respond(
            service,
            request,
            fields,
            response_id,
            task,
            writer,
            ignored=NAMES.ignored(fields, conversation.fields),
            error_event=writer.error_event,
        )

    @router.post("/v1/responses/input_tokens")
    async def count(request: Request) -> HttpResponse:
        fields: InputRequest = await read_fields(request, ROUTE_SCHEMAS[1], service.config)
        await service.check_model(fields.model)
        conversation = await Conversation.read(service, kept, fields, owner_of(request))
        return json_response(
            types.InputTokens(len(conversation.prompt.ids)), NAMES.ignored(fields, conversation.fields)
        )

    @router.post("/v1/responses/compact")
    async def compact(request: Request) -> HttpResponse:
        arrived = time.monotonic()
        service.accept()
        fields: CompactRequest = await read_fields(request, ROUTE_SCHEMAS[2], service.config)
        await service.check_model(fields.model)
        asked = fields.as_input()
        conversation = await Conversation.read(service, kept, asked, owner_of(request), INSTRUCTION)
        task = await prepare(conversation, asked.max_output_tokens, arrived)
        writer = CompactWriter(task, conversation.items, task.response_id)
        return await submit_and_respond(
            service,
            request,
            StreamFields(),
            task.response_id,
            task,
            writer,
            ignored=NAMES.ignored(fields, conversation.fields),
        )

    _add_stored(router, service, kept)
    return router


def _add_stored(router: APIRouter, service: Service, kept: KeptResponses) -> None:
    """Add the routes of responses that are stored, or whose stream is resumable."""

    @router.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> HttpResponse:
        _check_query(request, {"include", "include[]", "stream", "starting_after", "include_obfuscation"})
        if (first := _first_event(request)) is not None:
            wanted = Wanted(response_id, owner_of(request), first)
            try:
                return EventStream(service, await find_stream(service, wanted))
            except InvalidRequest as error:
                error.param = "starting_after"
                raise
        return HttpResponse((await _found(kept, response_id, request)).body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> HttpResponse:
        if not await kept.delete(response_id, owner_of(request)):
            raise not_found(response_id)
        return json_response(types.Deleted(response_id))

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> HttpResponse:
        if (cancelled := await kept.cancel(response_id, owner_of(request))) is not None:
            return HttpResponse(cancelled, media_type="application/json")
        await _found(kept, response_id, request)
        raise InvalidRequest(
            f"response {response_id[:100]!r} is finished: only a running response with a resumable stream can be cancelled; "
            "any other ends when its connection is closed"
        )

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> HttpResponse:
        _check_query(request, {"include", "include[]", "limit", "order", "after"})
        return json_response(_page((await _found(kept, response_id, request)).read_input(), request))


async def _found(kept: KeptResponses, response_id: str, request: Request) -> StoredResponse:
    found = await kept.get(response_id, owner_of(request))
    if found is None:
        raise not_found(response_id)
    return found


def _check_query(request: Request, known: set[str]) -> None:
    for name, value in request.query_params.multi_items():
        if name not in known:
            raise Unsupported(f"query parameter {name[:60]} is not supported here", param=name[:60])
        if name in ("include", "include[]") and value not in INCLUDABLE:
            raise InvalidRequest(f"include: {value[:60]!r} is not one of {', '.join(INCLUDABLE)}", param="include")


def _first_event(request: Request) -> int | None:
    """The first event to send of a resumed stream, by sequence_number. None: the whole response is requested."""
    after, is_stream = request.query_params.get("starting_after"), _switch(request, "stream")
    if _switch(request, "include_obfuscation"):
        raise Unsupported("include_obfuscation is not supported: events are not padded", param="include_obfuscation")
    if after is not None and not is_stream:
        raise InvalidRequest("starting_after is only for streams: set stream to true", param="starting_after")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) <= MAX_NUMBER_LEN):
        raise InvalidRequest(
            f"starting_after must be the number of an event, got {after[:60]!r}", param="starting_after"
        )
    if not is_stream:
        return None
    return 0 if after is None else int(after) + 1


def _switch(request: Request, name: str) -> bool:
    """A boolean of the query: true, false, 1 or 0 in any case."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "1", "false", "0"):
        raise InvalidRequest(f"{name} must be true or false, got {value[:60]!r}", param=name)
    return value in ("true", "1")


def _page(items: list[types.Item], request: Request) -> types.ItemList:
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_ITEMS):
        raise InvalidRequest(f"limit must be between 1 and {MAX_ITEMS}, got {limit[:60]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be 'asc' or 'desc', got {order[:60]!r}", param="order")
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        places = [at for at, item in enumerate(ordered) if item.id == after]
        if not places:
            raise InvalidRequest(f"after: the response has no input item {after[:100]!r}", param="after")
        start = places[0] + 1
    page = ordered[start : start + int(limit)]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return types.ItemList(page, first, last, start + len(page) < len(ordered))
