"""GET /v1/compat: for each field of each route, whether it is honoured, refused or accepted without effect, and why.

Rows are read from the same tree of schema and tables that requests are checked against."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Response

from octavo.config import Config
from octavo.server.endpoints import endpoint_modules
from octavo.server.schema import unknown as unknown_fields
from octavo.server.schema.fields import RouteSchema
from octavo.server.schema.shapes import Shape
from octavo.server.schema.unsupported import BY_FLAG, INSTEAD, WITHOUT_EFFECT
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service

Status = Literal["honoured", "refused", "accepted_without_effect"]
_WRONG_WITHOUT = "not supported, and ignoring it would change the answer"


class FieldSupport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the server does with one field of a dialect."""

    name: str  # a nested one by its path: tools[].function.name
    status: Status
    why: str = ""
    taken_values: list[Any] = []  # of a refused field: values that are accepted, as null always is


class DialectReport(msgspec.Struct, frozen=True):
    name: str
    path: str
    fields: list[FieldSupport]


class Compat(msgspec.Struct, frozen=True):
    strict: bool
    unknown_fields: Literal["refused", "named back in ignored_fields"]
    dialects: list[DialectReport]


SHAPES = {"GET /v1/compat": Shape(Compat)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/compat")
    async def compat() -> Response:
        config = service.config
        dialects = [
            DialectReport(route.name, route.path, sorted(rows(route, config), key=lambda field: field.name))
            for route in all_route_schemas()
        ]
        unknown: Any = "refused" if config.server.strict_fields else "named back in ignored_fields"
        return json_response(Compat(config.server.strict_fields, unknown, dialects))

    return router


def all_route_schemas() -> Iterator[RouteSchema[Any]]:
    """The schema of every route that reads a JSON body."""
    for module in endpoint_modules():
        yield from getattr(module, "ROUTE_SCHEMAS", None) or filter(None, [getattr(module, "ROUTE_SCHEMA", None)])


def rows(route: RouteSchema[Any], config: Config) -> Iterator[FieldSupport]:
    """Each field once, nested ones by their paths. Where objects of several kinds share a place, the best status counts."""
    order: list[Status] = ["honoured", "accepted_without_effect", "refused"]
    found: dict[str, FieldSupport] = {}
    for name, member in unknown_fields.rows(route.tree):
        field = _field(name, member, config)
        if name not in found or order.index(field.status) < order.index(found[name].status):
            found[name] = field
    yield from found.values()


def _field(name: str, member: unknown_fields.Member, config: Config) -> FieldSupport:
    if member.label:
        return FieldSupport(name, "accepted_without_effect", member.label)
    if member.harmless is None:
        if name in BY_FLAG and not getattr(config.server, BY_FLAG[name][0]):
            return FieldSupport(name, "refused", f"honoured only with {BY_FLAG[name][1]}")
        return FieldSupport(name, "honoured")
    if name in WITHOUT_EFFECT and not config.server.strict_fields:
        return FieldSupport(name, "accepted_without_effect", WITHOUT_EFFECT[name])
    instead = f"use {INSTEAD[name]}" if name in INSTEAD else _WRONG_WITHOUT
    return FieldSupport(name, "refused", WITHOUT_EFFECT.get(name, instead), list(member.harmless))
