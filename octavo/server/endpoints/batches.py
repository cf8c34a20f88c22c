"""/v1/batches: create, list, retrieve, cancel: OpenAI's shapes; the runner in the background does the rest.

A key sees its own batches, an admin key all (state/owners.py)."""

import contextlib
import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, WithJsonSchema

from octavo.errors import InvalidRequest, NotFound, OctavoError
from octavo.messages import ASLEEP, ReadSleep
from octavo.server.batch.batches import BATCH_ID, Batch, BatchStore, OutputExpiry
from octavo.server.batch.crash_memory import CrashMemory
from octavo.server.batch.lines import Rules
from octavo.server.batch.runner import MAX_ACTIVE, MAX_INPUT_LINES, BatchRunner
from octavo.server.batch.stores import StoreHost, Stores, open_stores
from octavo.server.endpoints.files import check_expiry
from octavo.server.http.sse import viewer_of
from octavo.server.schema.fields import MAX_METADATA, RequestFields, RouteSchema, check_metadata, read_fields
from octavo.server.schema.lists import AtMost
from octavo.server.schema.shapes import Shape
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.owners import Viewer
from octavo.server.state.pools import FILES
from octavo.server.state.service import Service

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/v1/rerank")
MAX_LIMIT = 100
MAX_HOURS = 14 * 24
ROWS_PER_SLOT = 4
"""Batches get one of this many rows: three quarters of the rows are left for interactive requests."""


class OutputExpiresAfter(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(RequestFields):
    input_file_id: str
    endpoint: Annotated[str, WithJsonSchema({"enum": list(ROUTES)})]
    completion_window: Annotated[str, WithJsonSchema({"type": "string", "pattern": "^[1-9][0-9]?h$"})]
    metadata: Annotated[dict[str, str] | None, AtMost(MAX_METADATA)] = None
    output_expires_after: OutputExpiresAfter | None = None


ROUTE_SCHEMA = RouteSchema("batches", "/v1/batches", BatchRequest, {})


class BatchList(msgspec.Struct, frozen=True):
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


SHAPES = {
    "POST /v1/batches": Shape(Batch, leads_to=("GET /v1/batches/{batch_id}", "POST /v1/batches/{batch_id}/cancel")),
    "GET /v1/batches": Shape(BatchList),
    "GET /v1/batches/{batch_id}": Shape(Batch),
    "POST /v1/batches/{batch_id}/cancel": Shape(Batch),
}


def router(service: Service) -> APIRouter:
    stores = open_stores(service)
    runners: list[BatchRunner] = []

    async def run() -> None:
        runner = _runner(service, stores())
        runners.append(runner)
        await runner.run()

    if service.config.batches.files_folder:
        service.background.append(run)

    def wake() -> None:
        for runner in runners:
            runner.wake()

    def choose(fields: BatchRequest, viewer: Viewer) -> Stores:
        return stores()

    async def check(fields: BatchRequest) -> None:
        await service.check_model(fields.model)

    return routes(service, choose, lambda: [stores()], check, wake)


def routes(
    host: StoreHost,
    choose: Callable[[BatchRequest, Viewer], Stores],
    every: Callable[[], Sequence[Stores]],
    check: Callable[[BatchRequest], Awaitable[None]],
    wake: Callable[[], None],
) -> APIRouter:
    """`choose`: the stores for a new batch, called in a thread; `every`: all that there are. `check` raises if a new batch is not to be
    taken, `wake` is called when one was made or cancelled."""
    router = APIRouter()

    @router.post("/v1/batches")
    async def create_batch(request: Request) -> Response:
        host.accept()
        fields = await read_fields(request, ROUTE_SCHEMA, host.config)
        await check(fields)
        try:
            batch = await FILES.run(_create, choose, fields, viewer_of(host, request))
        except NotFound as error:
            raise InvalidRequest(error.message, param="input_file_id") from None
        wake()
        return json_response(batch, fields.ignored)

    @router.get("/v1/batches")
    async def list_batches(request: Request, limit: int = 20, after: str | None = None) -> Response:
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidRequest(f"limit must be between 1 and {MAX_LIMIT}, got {str(limit)[:20]}", param="limit")
        if after is not None and not BATCH_ID.fullmatch(after):
            raise InvalidRequest("after must be the id of a batch", param="after")
        batches = await FILES.run(_newest_first, every(), viewer_of(host, request))
        if after is not None:
            batches = [batch for batch in batches if batch.id < after]
        page = batches[:limit]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return json_response(BatchList(page, first, last, len(batches) > limit))

    @router.get("/v1/batches/{batch_id}")
    async def retrieve_batch(batch_id: str, request: Request) -> Response:
        viewer = viewer_of(host, request)
        found = await FILES.run(_first_with, every(), lambda store: store.get(batch_id, viewer))
        return json_response(found)

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        viewer = viewer_of(host, request)
        batch = await FILES.run(_first_with, every(), lambda store: store.cancel(batch_id, viewer))
        wake()
        return json_response(batch)

    return router


def _newest_first(every: Sequence[Stores], viewer: Viewer) -> list[Batch]:
    found = [batch for stores in every for batch in stores.batches.newest_first(viewer)]
    return found if len(every) == 1 else sorted(found, key=lambda batch: batch.id, reverse=True)


def _first_with(every: Sequence[Stores], ask: Callable[[BatchStore], Batch]) -> Batch:
    """The answer of the store that has the batch. Raises NotFound."""
    for stores in every[:-1]:
        with contextlib.suppress(NotFound):
            return ask(stores.batches)
    return ask(every[-1].batches)


def batch_routes() -> tuple[str, ...]:
    """The routes of ROUTES that this server has."""
    return tuple(path for path in ROUTES if path in _route_schemas())


def seeded_routes() -> frozenset[str]:
    """The routes whose requests take a seed."""
    return frozenset(path for path, route in _route_schemas().items() if "seed" in route.schema.model_fields)


@functools.cache
def _route_schemas() -> dict[str, RouteSchema[Any]]:
    from octavo.server.endpoints.compat import all_route_schemas  # which imports this file, among others

    return {route.path: route for route in all_route_schemas()}


def _runner(service: Service, stores: Stores) -> BatchRunner:
    assert service.ask is not None
    config = service.config
    max_bytes, is_strict = int(config.budget.max_body_bytes), config.server.strict_fields
    rules = Rules(batch_routes(), max_bytes, is_strict, max_lines=MAX_INPUT_LINES)
    lock = stores.root / "runner.lock"

    def is_crowded() -> bool:
        return any(heartbeat.num_waiting for heartbeat in service.engine.heartbeats())

    def num_seated() -> int:
        heartbeats = service.engine.heartbeats()
        return sum(len(heartbeat.seated()) for heartbeat in heartbeats) if heartbeats else 1

    num_slots = _num_slots(service)
    memory = CrashMemory(stores.root, num_slots + MAX_ACTIVE, lambda: service.engine.report is None, num_seated)
    return BatchRunner(
        stores.files, stores.batches, service.ask, rules, service.model_name, lock, is_crowded, memory, num_slots,
        functools.partial(_sleeps, service),
    )  # fmt: skip


async def _sleeps(service: Service) -> bool:
    try:
        return await service.engine.control(ReadSleep(call=0)) == ASLEEP
    except OctavoError:  # it is being restarted, and then it is awake
        return False


def _num_slots(service: Service) -> int:
    wanted = service.config.batches.batch_concurrency
    return wanted if isinstance(wanted, int) else max(1, service.report.max_num_seqs // ROWS_PER_SLOT)


def _create(choose: Callable[[BatchRequest, Viewer], Stores], fields: BatchRequest, viewer: Viewer) -> Batch:
    stores = choose(fields, viewer)
    routes = batch_routes()
    if fields.endpoint not in routes:
        raise InvalidRequest(
            f"endpoint must be one of {', '.join(routes)}, got {fields.endpoint[:60]!r}", param="endpoint"
        )
    seconds = _seconds(fields.completion_window)
    check_metadata(fields.metadata or {})
    file = stores.files.get(fields.input_file_id, viewer)
    if file.purpose != "batch":
        raise InvalidRequest(f"the file's purpose must be batch, got {file.purpose}", param="input_file_id")
    expiry = None
    if fields.output_expires_after is not None:
        expiry = OutputExpiry(check_expiry(fields.output_expires_after.seconds, "output_expires_after.seconds"))
    return stores.batches.create(
        stores.files, fields.endpoint, file.id, fields.completion_window, seconds, fields.metadata, expiry, viewer.owner
    )


def _seconds(window: str) -> int:
    hours = re.fullmatch(r"([1-9][0-9]{0,2})h", window, re.ASCII)
    if not hours or int(hours[1]) > MAX_HOURS:
        raise InvalidRequest(
            f"completion_window must be 24h, or another number of hours up to {MAX_HOURS}h, got {window[:20]!r}",
            param="completion_window",
        )
    return int(hours[1]) * 3600
