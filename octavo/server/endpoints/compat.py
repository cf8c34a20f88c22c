"""GET /v1/compat: what becomes of each field of each dialect: honoured, refused, or accepted without effect, and why.
Knows no field: every row is read from the schema and the tables by which requests are parsed."""

import importlib
import pkgutil
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Response
from pydantic import BaseModel

from octavo.config import ServerConfig
from octavo.server import endpoints
from octavo.server.answers import json_answer
from octavo.server.fields import BY_FLAG, LABELS, WITHOUT_EFFECT, Dialect
from octavo.server.service import Service
from octavo.server.shapes import Shape

Status = Literal["honoured", "refused", "accepted_without_effect"]


class Field(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    status: Status
    why: str = ""
    taken_values: list[Any] = []  # of a refused field: these ask for nothing, and null never does


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
        return json_answer(Compat(server.strict_fields, unknown, dialects))

    return router


def all_dialects() -> Iterator[Dialect[Any]]:
    """Those of every endpoint that reads a body: its DIALECT, or several DIALECTS."""
    for found in sorted(pkgutil.iter_modules(endpoints.__path__), key=lambda module: module.name):
        module = importlib.import_module(f"{endpoints.__name__}.{found.name}")
        yield from getattr(module, "DIALECTS", None) or filter(None, [getattr(module, "DIALECT", None)])


def rows(dialect: Dialect[Any], server: ServerConfig) -> Iterator[Field]:
    for name, field in dialect.schema.model_fields.items():
        if name in LABELS:
            yield Field(name, "accepted_without_effect", LABELS[name])
            continue
        if name in BY_FLAG and not getattr(server, BY_FLAG[name][0]):
            yield Field(name, "refused", f"honoured only with {BY_FLAG[name][1]}")
            continue
        yield Field(name, "honoured")
        for inner in _models_in(field.annotation):
            yield from (Field(f"{name}.{part}", "honoured") for part in inner.model_fields)
    for name, harmless in dialect.not_offered.items():
        if name in WITHOUT_EFFECT and not server.strict_fields:
            yield Field(name, "accepted_without_effect", WITHOUT_EFFECT[name])
        else:
            why = WITHOUT_EFFECT.get(name, "not offered, and an answer without it would not be the one asked for")
            yield Field(name, "refused", why, list(harmless))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)
