"""What all models of a gateway share: keys and their usage, files and batches. Their routes need no model: they read and write the folder of
files, in which the server of each model finds its batches."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from octavo.config import Config
from octavo.errors import EngineUnavailable, ModelNotFound, NotFound, OctavoError, quote
from octavo.ipc.launch import Patience
from octavo.server.app import respond_with_error
from octavo.server.batch.files import FileStore
from octavo.server.batch.stores import Stores, make_stores
from octavo.server.endpoints import batches, files, usage
from octavo.server.state.disconnect import DRAIN_RETRY_AFTER
from octavo.server.state.owners import Viewer, owners_of
from octavo.server.state.tenants import Tenants

ROUTES = ("/v1/files", "/v1/batches", "/v1/usage")


class _Body(msgspec.Struct):
    model: str | None = None


class _Line(msgspec.Struct):
    body: _Body = msgspec.field(default_factory=_Body)


_line = msgspec.json.Decoder(_Line)


class Shared:
    """The gateway as its own routes and its bodies see it. `configs`: of each model's server, by the model's name, the first one first."""

    def __init__(self, config: Config, configs: Mapping[str, Config]) -> None:
        self.config = config
        self.owners = owners_of(config)
        self.tenants = Tenants(config, self.owners)
        self.body_limits: dict[str, int] = {}
        self.patience = Patience()
        self.draining = False
        self.stores = {name: make_stores(each.batches) for name, each in configs.items()}
        self._default = next(iter(configs))
        self._max_line = int(config.budget.max_body_bytes)
        self._arriving: set[asyncio.Timeout] = set()
        self.app = self._build_app()

    @staticmethod
    def has_route(route: str) -> bool:
        return any(route == each or route.startswith(each + "/") for each in ROUTES)

    def accept(self) -> None:
        if self.draining:
            raise EngineUnavailable("the server is shutting down and accepts no new requests", DRAIN_RETRY_AFTER)

    @contextlib.contextmanager
    def arriving(self, limit: asyncio.Timeout) -> Iterator[None]:
        self._arriving.add(limit)
        try:
            yield
        finally:
            self._arriving.discard(limit)

    def drain(self) -> None:
        """Take no new work; bodies that are on their way get Patience.farewell for their next bytes."""
        self.draining = True
        soon = asyncio.get_running_loop().time() + self.patience.farewell
        for limit in self._arriving:
            if (until := limit.when()) is None or until > soon:
                limit.reschedule(soon)

    def models_with_batches(self) -> set[str]:
        """Models whose servers have batches to run. Reads folders: call it in a thread."""
        return {name for name, stores in self.stores.items() if stores.batches.unfinished()}

    def close(self) -> None:
        self.tenants.close()

    def _build_app(self) -> FastAPI:
        app = FastAPI(title="Octavo", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        app.router.routes += files.router(self).routes
        app.router.routes += usage.router(self).routes
        every = list(self.stores.values())
        app.router.routes += batches.routes(self, self._choose, lambda: every, self._check, lambda: None).routes
        for error in (OctavoError, HTTPException, RequestValidationError):
            app.add_exception_handler(error, respond_with_error)
        return app

    async def _check(self, fields: batches.BatchRequest) -> None:
        if fields.model and fields.model not in self.stores:
            names = ", ".join(map(repr, self.stores))
            raise ModelNotFound(f"model {quote(fields.model)} is not served here; use one of {names}", param="model")

    def _choose(self, fields: batches.BatchRequest, viewer: Viewer) -> Stores:
        """The model that the batch names, or its first line does. Lines that name another one are answered with an error, as those of a
        server with one model are."""
        every = self.stores[self._default].files
        name = fields.model or first_model(every, fields.input_file_id, viewer, self._max_line)
        return self.stores.get(name, self.stores[self._default])


def first_model(files: FileStore, file_id: str, viewer: Viewer, max_bytes: int) -> str:
    """The model of the first request of a batch's input. Empty: it names none, or cannot be read, which its validation reports."""
    with (
        contextlib.suppress(NotFound, msgspec.DecodeError, RecursionError, UnicodeDecodeError),
        files.open(file_id, viewer) as file,
    ):
        left = max_bytes
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            if line.strip():
                return _line.decode(line.removeprefix(b"\xef\xbb\xbf")).body.model or ""
    return ""
