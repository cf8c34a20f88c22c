"""GET /version: Octavo's version, and what the bytes of answers depend on, once the engine has reported it."""

import msgspec
from fastapi import APIRouter, Response

from octavo.server.schema.shapes import Shape
from octavo.server.state.ignored_fields import json_response
from octavo.server.state.service import Service, version


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    version: str
    system_fingerprint: str = ""  # absent while the engine starts
    fingerprint: dict[str, str] = {}  # its parts: servers in which they are equal give equal bytes


SHAPES = {"GET /version": Shape(Version)}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/version")
    async def read_version() -> Response:
        report = service.engine.report
        if report is None:
            return json_response(Version(version()))
        return json_response(Version(version(), report.system_fingerprint, report.fingerprint))

    return router
