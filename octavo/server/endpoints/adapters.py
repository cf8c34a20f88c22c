"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters that come and go while the server runs. With API keys, only an admin
key may do so."""

from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.errors import ConfigError, Forbidden, InvalidRequest, Unsupported, quote
from octavo.messages import AdapterRef, LoadAdapter
from octavo.server.http.sse import owner_of
from octavo.server.schema.fields import RequestFields, RouteSchema, read_fields
from octavo.server.schema.shapes import Shape
from octavo.server.state.disconnect import while_connected
from octavo.server.state.pools import ADAPTERS
from octavo.server.state.service import Service

LOAD_SECONDS = 120.0  # for the engine to read an adapter


class LoadFields(RequestFields):
    lora_name: str
    lora_path: str
    load_inplace: bool | None = None  # replace the adapter that has this name
    base_model_name: str | None = None  # must be the model that is served


class UnloadFields(RequestFields):
    lora_name: str


LOAD = RouteSchema("load_lora_adapter", "/v1/load_lora_adapter", LoadFields, {})
UNLOAD = RouteSchema("unload_lora_adapter", "/v1/unload_lora_adapter", UnloadFields, {})
ROUTE_SCHEMAS: list[RouteSchema[Any]] = [LOAD, UNLOAD]
SHAPES = {f"POST {schema.path}": Shape(media=("text/plain",)) for schema in ROUTE_SCHEMAS}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post(LOAD.path)
    async def load(request: Request) -> Response:
        _check(service, request)
        service.accept()
        fields = await read_fields(request, LOAD, service.config)
        name, replaces = fields.lora_name, bool(fields.load_inplace)
        if fields.base_model_name and fields.base_model_name not in service.model_names:
            names = " or ".join(map(repr, service.model_names))
            raise InvalidRequest(
                f"base_model_name must be {names}, got {quote(fields.base_model_name)}", "base_model_name"
            )
        path = service.adapters.allowed(fields.lora_path)
        service.adapters.check_new(name, replaces)
        ref = await while_connected(ADAPTERS.run(_describe, service, name, path), service.track)
        if isinstance(ref, str):
            raise InvalidRequest(ref, param="lora_path")
        if refusal := await service.query(LoadAdapter(0, ref), LOAD_SECONDS):
            raise InvalidRequest(refusal, param="lora_path")
        await ADAPTERS.run(lambda: service.adapters.add(ref, replaces))
        return _answer(f"Success: LoRA adapter '{name}' added successfully.", fields)

    @router.post(UNLOAD.path)
    async def unload(request: Request) -> Response:
        _check(service, request)
        fields = await read_fields(request, UNLOAD, service.config)
        await ADAPTERS.run(lambda: service.adapters.remove(fields.lora_name))
        return _answer(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.", fields)

    return router


def _describe(service: Service, name: str, path: str) -> AdapterRef | str:
    """Read an adapter's headers. → the adapter, or what is wrong with it."""
    try:
        return service.adapters.describe(name, path)
    except ConfigError as error:
        return str(error)


def _answer(text: str, fields: RequestFields) -> Response:
    """vLLM's text, and the fields that had no effect."""
    ignored = f" Ignored fields: {', '.join(fields.ignored)}." if fields.ignored else ""
    return Response(text + ignored, media_type="text/plain")


def _check(service: Service, request: Request) -> None:
    if not service.adapters.is_enabled:
        raise Unsupported("this server serves no adapters: start it with --enable-lora")
    if not service.owners.is_admin(owner_of(request)):
        raise Forbidden("only an admin key may load and unload adapters: start the server with --admin-key", "key")
