"""GET /: the cockpit, a page that draws the live feed; GET /play: the playground, which talks to the model; their files.
Knows nothing of what they draw. The files hold nothing secret, so they need no key: what they ask for does."""

from importlib import resources

from fastapi import APIRouter, Response

from octavo.errors import NotFound
from octavo.server.service import Service
from octavo.server.shapes import Shape

KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
HEADERS = {
    # Nothing from elsewhere, neither scripts nor pictures, and nobody puts the page into another one.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
SHAPES = {
    "GET /": Shape(media=("text/html",)),
    "GET /play": Shape(media=("text/html",)),
    "GET /pages/{name}": Shape(media=tuple(KINDS.values())),
}


def router(service: Service) -> APIRouter:
    router = APIRouter()
    folder = resources.files("octavo.server") / "pages"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in KINDS}

    def page(name: str) -> Response:
        if name not in files:
            raise NotFound(f"there is no page {name[:60]!r}")
        kind = KINDS[name.rpartition(".")[2]]
        return Response(files[name], headers=HEADERS, media_type=kind)

    @router.get("/")
    async def cockpit() -> Response:
        return page("cockpit.html")

    @router.get("/play")
    async def playground() -> Response:
        return page("play.html")

    @router.get("/pages/{name}")
    async def file(name: str) -> Response:
        return page(name)

    return router
