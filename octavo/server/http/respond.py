"""submit_and_respond: gives a task to the engine, and sends what its writer makes of it as the HTTP response."""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo import fresh
from octavo.errors import OctavoError
from octavo.observe.journeys.journey import current
from octavo.server.http import errors
from octavo.server.http.middleware import route_of
from octavo.server.http.sse import KEEP_ALIVE, ErrorEvent, EventStream, owner_of
from octavo.server.schema.fields import PlainStreamFields
from octavo.server.state.disconnect import while_connected
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.loopback import RECORD
from octavo.server.state.resume import StreamLog
from octavo.server.state.service import Service
from octavo.server.state.stream_records import RecordHead, StreamRecord

log = logging.getLogger("octavo.server")


class Task(Protocol):
    """What the engine is to compute for one response."""

    @property
    def request_ids(self) -> Sequence[str]: ...

    def submit(self) -> None: ...


class Writer(Protocol):
    """Writes a submitted task's answer in its dialect: one of the two is used, once."""

    def stream(self) -> AsyncGenerator[bytes, None]: ...  # events

    async def collect(self) -> msgspec.Struct | Sequence[msgspec.Struct]: ...


async def submit_and_respond(
    service: Service,
    request: Request,
    fields: PlainStreamFields,
    response_id: str,
    task: Task,
    writer: Writer,
    *,
    ignored: Sequence[str],
    error_event: ErrorEvent = errors.error_event,
    keep_alive: bytes = KEEP_ALIVE,
    headers: Mapping[str, str] | None = None,
    stream_class: type[EventStream] = EventStream,
) -> Response:
    """Raises the error with which the engine refuses a request. `error_event`, `keep_alive`: as for an EventStream.
    `stream_class`: how the writer's events are framed. Only server-sent events can be resumed.

    What is submitted here and not read to its end is aborted when the HTTP request is over (RequestMiddleware)."""
    kept = service.logs.open(response_id, owner_of(request)) if fields.stream and fields.wants_resumable else None
    if kept is not None:
        await _record(service, request, kept, task)
    try:
        task.submit()
    except BaseException:
        if kept is not None:
            if (record := request.scope.get(RECORD)) is not None:  # the client may ask again, here or elsewhere
                kept.on_drop = functools.partial(service.records.forget, record)
            service.logs.end(kept.id, kept.owner)
        raise
    if not fields.stream:
        response = json_response(await while_connected(writer.collect(), service.track), ignored)
        response.headers.update(headers or {})
        return response
    events = writer.stream()
    if kept is not None:
        if error_event is not errors.error_event:  # a process that resumes the stream does not know the dialect
            events = _with_error_event(events, error_event, request.scope["octavo.request_id"])
        _fill(service, kept, events, ignored)
        if RECORD in request.scope:  # only the log is wanted
            return Response(status_code=204)
        events, ignored, headers = kept.read(0), (), {"x-stream-id": response_id, **(headers or {})}
    return stream_class(
        service,
        events,
        ignored,
        error_event=error_event,
        keep_alive=keep_alive,
        headers=headers,
        queued=task.request_ids if fields.wants_queue else (),
    )


async def _record(service: Service, request: Request, kept: StreamLog, task: Task) -> None:
    """Have another process go on with the stream if this one ends. Not one of several requests: in which order their tokens came is not known."""
    record: StreamRecord | None = request.scope.get(RECORD)
    source = fresh.current.get()
    if record is None and source is not None and len(task.request_ids) == 1:
        head = RecordHead(
            route_of(request.scope), await request.body(), kept.owner, source.key, source.now, service.fingerprint
        )
        record = service.records.begin(kept.id, head)
    if record is not None:
        assert record.id == kept.id, "the same request with the same values has the same id"
        service.records.attach(record, task.request_ids[0])
        kept.on_drop = functools.partial(service.records.remove, record)


def _fill(service: Service, kept: StreamLog, events: AsyncGenerator[bytes, None], ignored: Sequence[str]) -> None:
    """Write `events` into the log in a task of its own, which outlives the client's connection."""
    filling = kept.filling = asyncio.create_task(kept.fill(events, ignored))
    service.enter()  # a draining server waits for it, as for any response
    filling.add_done_callback(lambda _: service.leave())
    service.track(filling)
    if (journey := current.get()) is not None:
        journey.making = "going on"

        def made(filling: "asyncio.Task[None]") -> None:
            service.release(journey.requests)
            service.journeys.made(journey, kept.failure, is_given_up=filling.cancelled())

        filling.add_done_callback(made)


async def _with_error_event(
    events: AsyncGenerator[bytes, None], error_event: Callable[[Exception, str], bytes], request_id: str
) -> AsyncGenerator[bytes, None]:
    """`events`; an error after the first becomes the last of them."""
    has_begun = False
    async with aclosing(events):
        try:
            async for chunk in events:
                has_begun = True
                yield chunk
        except Exception as error:
            if not has_begun:
                raise
            if not isinstance(error, OctavoError):
                log.exception("request %s failed in its stream", request_id)
            errors.note(error)
            yield error_event(error, request_id)
