"""/api/tags, /api/show, /api/ps, /api/version, /api/pull and /api/delete, in Ollama's dialect."""

from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.errors import ConfigError, Forbidden, InvalidRequest, Unsupported
from octavo.server.dialects.ollama import models
from octavo.server.dialects.ollama.errors import ERROR_SCHEMA, error_line
from octavo.server.dialects.ollama.names import is_served
from octavo.server.dialects.ollama.pull import Done, PullStatus, PullWriter, parse_name
from octavo.server.dialects.ollama.request import PullRequest, ShowRequest
from octavo.server.http.ndjson import LineStream
from octavo.server.http.sse import owner_of
from octavo.server.schema.fields import RouteSchema, read_fields
from octavo.server.schema.shapes import LINES, Shape
from octavo.server.state.disconnect import while_connected
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.pools import FILES
from octavo.server.state.service import Service, version
from octavo.weights.sources.store import Store

SHOW = RouteSchema("ollama show", "/api/show", ShowRequest, {"verbose": (False,)})
PULL = RouteSchema(
    "ollama pull", "/api/pull", PullRequest, {"insecure": (False,), "username": ("",), "password": ("",)}
)
DELETE = RouteSchema("ollama delete", "/api/delete", models.NamedRequest, {})
ROUTE_SCHEMAS: list[RouteSchema[Any]] = [SHOW, PULL, DELETE]

SHAPES = {
    "GET /api/tags": Shape(models.Tags, error=ERROR_SCHEMA),
    "GET /api/ps": Shape(models.Running, error=ERROR_SCHEMA),
    "GET /api/version": Shape(models.ApiVersion, error=ERROR_SCHEMA),
    "POST /api/show": Shape(models.Shown, error=ERROR_SCHEMA),
    "POST /api/pull": Shape(PullStatus, LINES, error=ERROR_SCHEMA),
    "DELETE /api/delete": Shape(Done, error=ERROR_SCHEMA),
}


def router(service: Service) -> APIRouter:
    router = APIRouter()
    config = service.config

    @router.get("/api/tags")
    async def tags() -> Response:
        return json_response(await FILES.run(models.tags, service))

    @router.get("/api/ps")
    async def running() -> Response:
        return json_response(await FILES.run(models.running, service))

    @router.get("/api/version")
    async def read_version() -> Response:
        return json_response(models.ApiVersion(models.API_VERSION, version()))

    @router.post("/api/show")
    async def show(request: Request) -> Response:
        fields = await read_fields(request, SHOW, config)
        return json_response(await FILES.run(models.show, service, fields.wanted), fields.ignored)

    @router.post("/api/pull")
    async def pull(request: Request) -> Response:
        check_admin(service, request)
        service.accept()
        fields = await read_fields(request, PULL, config)
        most = int(config.server.max_model_store_bytes)
        if not most:
            raise Unsupported("models cannot be pulled over HTTP (--max-model-store-bytes 0)")
        writer = PullWriter(parse_name(fields.wanted), most)
        if not fields.stream:
            return json_response(await while_connected(writer.collect(), service.track), fields.ignored)
        return LineStream(service, writer.stream(), fields.ignored, error_event=error_line, keep_alive=b"")

    @router.delete("/api/delete")
    async def delete(request: Request) -> Response:
        check_admin(service, request)
        fields = await read_fields(request, DELETE, config)
        if not fields.wanted:
            raise InvalidRequest("model is missing", param="model")
        if is_served(service, fields.wanted):
            raise InvalidRequest(f"{service.model_name} is being served: stop the server first", param="model")
        try:
            await FILES.run(lambda: Store().remove(models.find(fields.wanted)))
        except ConfigError as error:
            raise InvalidRequest(error.message, param="model") from None
        return json_response(Done(), fields.ignored)

    return router


def check_admin(service: Service, request: Request) -> None:
    """Raise Forbidden for a key that may not change which models this machine has. A server without keys trusts its clients."""
    if not service.owners.is_admin(owner_of(request)):
        raise Forbidden("only an admin key may pull and delete models: start the server with --admin-key", "key")
