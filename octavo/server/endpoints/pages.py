"""GET / (the cockpit), /play (the playground) and /pages/{name} (their files), read once from the package."""

from importlib.resources import files

from fastapi import APIRouter, Response

from octavo.errors import NotFound
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    # Nothing from other origins, nothing inline: a model's answer cannot inject a script.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
PAGES = {"/": "cockpit.html", "/play": "play.html"}
SHAPES = {
    "GET /": Shape(media=("text/html",)),
    "GET /play": Shape(media=("text/html",)),
    "GET /pages/{name}": Shape(media=("text/css", "text/javascript", "image/svg+xml")),
}


def router(service: Service) -> APIRouter:
    found = {
        entry.name: entry.read_bytes()
        for entry in files("octavo.server").joinpath("static").iterdir()
        if entry.name.rpartition(".")[2] in TYPES
    }
    router = APIRouter()

    @router.get("/")
    async def cockpit() -> Response:
        return _file(found, PAGES["/"])

    @router.get("/play")
    async def playground() -> Response:
        return _file(found, PAGES["/play"])

    @router.get("/pages/{name}")
    async def part(name: str) -> Response:
        if name not in found or name in PAGES.values():
            raise NotFound(f"no such file: {name[:60]!r}")
        return _file(found, name)

    return router


def _file(found: dict[str, bytes], name: str) -> Response:
    return Response(found[name], media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
