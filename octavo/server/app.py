"""build_app: the ASGI application with its routers, its error handler and its middleware."""

import functools
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match

from octavo.client.client import EngineClient
from octavo.config import Config, split_list
from octavo.errors import InvalidRequest, OctavoError
from octavo.server.endpoints import routers
from octavo.server.http.errors import error_response
from octavo.server.http.middleware import RequestMiddleware, route_of
from octavo.server.openapi import build_document
from octavo.server.state.loopback import ask
from octavo.server.state.service import Service
from octavo.server.state.tenants import LIMIT_HEADERS
from octavo.text import Text

VERSION = "/v1"
"""Begins OpenAI's and Anthropic's routes."""
_ABSENT = {
    "/api/create": "there are no Modelfiles: a request has its system message, and octavo serve has --override-generation-config "
    "and --chat-template",
    "/api/copy": "octavo serve MODEL --served-model-name NAME gives a model another name",
    "/api/push": "models are not sent to the hub",
    "/api/blobs": "models are files of the hub: POST /api/pull fetches one",
}
"""Routes of Ollama that are not here, and what to use instead."""


def build_app(
    engine: EngineClient, text: Text, config: Config, model_name: str, model_path: Path | None = None
) -> FastAPI:
    """The ASGI application; its Service is at `app.state.service`."""
    service = Service(engine, text, config, model_name, model_path)
    # No docs of the framework: request bodies are read and checked by hand, and its page loads scripts from elsewhere. endpoints/docs.py
    # has a page of ours.
    app = FastAPI(title="Octavo", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    service.ask = functools.partial(ask, app)
    service.openapi = functools.partial(build_document, app, service)
    # Not include_router(): it would make each route anew, at the first request, and ask every router in turn for each request.
    for router in routers(service):
        app.router.routes += router.routes
    for error in (OctavoError, HTTPException, RequestValidationError):
        app.add_exception_handler(error, respond_with_error)
    app.add_middleware(RequestMiddleware, service=service)
    origins = split_list(config.server.allowed_origins)
    if origins:
        # Outside RequestMiddleware: a browser's preflight carries no key, and refusals must be readable, too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=split_list(config.server.allowed_methods),
            allow_headers=split_list(config.server.allowed_headers),
            allow_credentials=config.server.allow_credentials,
            expose_headers=["x-request-id", "x-stream-id", "retry-after", *LIMIT_HEADERS],
        )
    return app


async def respond_with_error(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        wrong = error.errors()[0]
        name = str(wrong["loc"][-1])[:100]
        error = InvalidRequest(f"{name}: {wrong['msg'][:1].lower() + wrong['msg'][1:200]}", param=name)
    path = route_of(request.scope)
    is_unknown = isinstance(error, HTTPException) and error.status_code == 404
    hint = ""
    if is_unknown and not (hint := _absent(path)) and (near := _near(request, path)):
        hint = f"did you mean {near}?"
    return error_response(error, request.scope["octavo.request_id"], request.method, path, hint)


def _absent(path: str) -> str:
    """Why a route that clients of other servers know is not here."""
    return next((why for root, why in _ABSENT.items() if path == root or path.startswith(root + "/")), "")


def _near(request: Request, path: str) -> str:
    """The route that is a typing mistake away from `path`: a plural, a capital letter or a slash; or the version once before it, as
    clients whose base URL has none, or one too many, leave it out or say it twice."""
    if _has_route(request, path):  # it found nothing at its own address, a file of the pages for example
        return ""
    plain = path.lower().rstrip("/")
    versioned = plain.removeprefix(VERSION) if plain.startswith(VERSION + "/") else VERSION + plain
    for near in (plain, versioned):
        for meant in (near, near + "s", near.removesuffix("s")):
            if meant != path and _has_route(request, meant):
                return meant
    return ""


def _has_route(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": request.scope.get("root_path", "") + path}
    return any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes)
