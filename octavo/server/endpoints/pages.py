"""GET / (the cockpit), /play (the chat; for an encoder a page for its embeddings) and /pages/{name} (their files), read once from the
package."""

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

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
COCKPIT, CHAT, EMBEDDINGS = "cockpit.html", "play.html", "embed.html"
SHAPES = {
    "GET /": Shape(media=("text/html",)),
    "GET /play": Shape(media=("text/html",)),
    "GET /pages/{name}": Shape(media=("text/css", "text/javascript", "image/svg+xml")),
}


def router(service: Service) -> APIRouter:
    found = dict(_read(files("octavo.server").joinpath("static"), ""))
    router = APIRouter()

    @router.get("/")
    async def cockpit() -> Response:
        return _file(found, COCKPIT)

    @router.get("/play")
    async def playground() -> Response:
        report = service.engine.report  # None while an engine restarts: the chat page waits for it
        return _file(found, CHAT if report is None or report.can_generate else EMBEDDINGS)

    @router.get("/pages/{name:path}")
    async def part(name: str) -> Response:
        if name not in found or name.endswith(".html"):
            raise NotFound(f"no such file: {name[:60]!r}")
        return _file(found, name)

    return router


def _read(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _read(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in TYPES:
            yield prefix + entry.name, entry.read_bytes()


def _file(found: dict[str, bytes], name: str) -> Response:
    return Response(found[name], media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)
