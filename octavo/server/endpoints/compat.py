"""GET /v1/compat: for each field of each dialect, whether it is honoured, refused or accepted without effect, and why.

Rows are read from the same tree of schema and tables that requests are checked against."""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Response

from octavo.config import ServerConfig
from octavo.server.endpoints import endpoint_modules
from octavo.server.schema import unknown as unknown_fields
from octavo.server.schema.fields import Dialect
from octavo.server.schema.shapes import Shape
from octavo.server.schema.unsupported import BY_FLAG, INSTEAD, WITHOUT_EFFECT
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service

Status = Literal["honoured", "refused", "accepted_without_effect"]
_WRONG_WITHOUT = "not supported, and ignoring it would change the answer"


class Field(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str  # a nested one by its path: tools[].function.name
    status: Status
    why: str = ""
    taken_values: list[Any] = []  # of a refused field: values that are accepted, as null always is


class DialectReport(msgspec.Struct, frozen=True):
    name: str
    path: str
    fields: list[Field]


class Compat(msgspec.Struct, frozen=True):
    strict: bool
    unknown_fields: Literal["refused", "named back in ignored_fields"]
    dialects: list[DialectReport]


SHAPES = {"GET /v1/compat": Shape(Compat)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/compat")
    async def compat() -> Response:
        server = service.config.server
        dialects = [
            DialectReport(dialect.name, dialect.path, sorted(rows(dialect, server), key=lambda field: field.name))
            for dialect in all_dialects()
        ]
        unknown: Any = "refused" if server.strict_fields else "named back in ignored_fields"
        return json_response(Compat(server.strict_fields, unknown, dialects))

    return router


def all_dialects() -> Iterator[Dialect[Any]]:
    """The dialects of every endpoint that reads a body."""
    for module in endpoint_modules():
        yield from getattr(module, "DIALECTS", None) or filter(None, [getattr(module, "DIALECT", None)])


def rows(dialect: Dialect[Any], server: ServerConfig) -> Iterator[Field]:
    """Each field once, nested ones by their paths. Where objects of several kinds share a place, the best status counts."""
    order: list[Status] = ["honoured", "accepted_without_effect", "refused"]
    found: dict[str, Field] = {}
    for name, member in unknown_fields.rows(dialect.tree):
        field = _field(name, member, server)
        if name not in found or order.index(field.status) < order.index(found[name].status):
            found[name] = field
    yield from found.values()


def _field(name: str, member: unknown_fields.Member, server: ServerConfig) -> Field:
    if member.label:
        return Field(name, "accepted_without_effect", member.label)
    if member.harmless is None:
        if name in BY_FLAG and not getattr(server, BY_FLAG[name][0]):
            return Field(name, "refused", f"honoured only with {BY_FLAG[name][1]}")
        return Field(name, "honoured")
    if name in WITHOUT_EFFECT and not server.strict_fields:
        return Field(name, "accepted_without_effect", WITHOUT_EFFECT[name])
    instead = f"use {INSTEAD[name]}" if name in INSTEAD else _WRONG_WITHOUT
    return Field(name, "refused", WITHOUT_EFFECT.get(name, instead), list(member.harmless))
